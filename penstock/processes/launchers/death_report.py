"""Describes how a worker process ended: its exit code or signal, and whether memory was the cause.

A worker that notices that it runs out of memory ends with an exit code of its own. One that the system kills
for it gets an ordinary SIGKILL. Linux counts those kills, so a count that has grown since the worker started
tells the two apart.
"""

import signal
from collections import deque
from pathlib import Path

from penstock.errors import WorkerDied

OUT_OF_MEMORY = 12
"""The exit code of a worker that ran out of memory: the value of ENOMEM."""
NUM_LAST_LINES, MAX_LINE = 40, 4096
VMSTAT = Path("/proc/vmstat")
HINTS = {signal.SIGXCPU: ": it used more CPU time than its call may (reward.cpu_s, rollout.cpu_s)"}


def count_oom_kills(vmstat: Path = VMSTAT) -> int:
    """Return how many processes the system has killed for lack of memory; 0 where it does not say."""
    try:
        for line in vmstat.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return 0


def death_of(name: str, pid: int, code: int, log: Path, oom_kills: int, begin: int = 0) -> WorkerDied:
    """Describe a worker's end. `oom_kills` is `count_oom_kills()` at its start, and `begin` the length of its
    log then."""
    was_killed = code == -signal.SIGKILL and count_oom_kills() > oom_kills
    if code == OUT_OF_MEMORY:
        how = "ran out of memory"
    elif was_killed:
        how = "was killed by SIGKILL, as the machine ran out of memory"
    elif code < 0:
        number = signal.Signals(-code)
        how = f"was killed by {number.name}{HINTS.get(number, '')}"
    else:
        how = f"ended with exit code {code}"
    message = f"worker {name} (pid {pid}) {how}; its log is {log}"
    return WorkerDied(message, tail(log, begin), out_of_memory=code == OUT_OF_MEMORY or was_killed)


class LastLines:
    """Keeps the last lines of an output that comes in arbitrary pieces."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=NUM_LAST_LINES)

    def add(self, output: bytes) -> None:
        lines = output.splitlines(keepends=True)
        if len(lines) > NUM_LAST_LINES:
            lines = lines[-NUM_LAST_LINES:]
            self._lines.clear()
        for line in lines:
            begun = self._lines.pop() if self._lines and not self._lines[-1].endswith(b"\n") else b""
            self._lines.append((begun + line)[-MAX_LINE:])

    def text(self) -> str:
        return b"".join(self._lines).decode(errors="replace")


def tail(log: Path, begin: int = 0) -> str:
    """Return the last lines that a log has after its first `begin` bytes, which earlier processes wrote."""
    if not log.is_file():
        return ""
    with log.open(errors="replace") as lines:
        lines.seek(begin)
        return "".join(deque(lines, maxlen=NUM_LAST_LINES))
