"""Finds the worker processes of a run by the logs that they write, and reads their state from Linux."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UserError
from penstock.processes.launchers.keeper import GRACE_S
from penstock.processes.launchers.signals import STACKS

PROC = Path("/proc")
STATES = {
    "R": "runs",
    "S": "waits",
    "D": "waits for a disk or a device",
    "T": "is stopped (SIGSTOP)",
    "Z": "has ended",
}
STACKS_S = 1.0
"""How long a process may take to write its stacks."""
LOOK_AGAIN_S = 0.05
ORPHANS_S = GRACE_S + 5.0
"""How long workers of a killed controller may take to end. The controller's keeper kills them after `GRACE_S`."""


@dataclass(frozen=True, slots=True)
class RunProcess:
    name: str
    pid: int
    state: str
    log: Path


def processes_of_run(folder: Path) -> list[RunProcess]:
    """Return the workers whose output goes into this run's logs; none where the system has no `/proc`."""
    if not PROC.is_dir():
        return []
    logs = {str(path.resolve()): path for path in (folder / "logs").glob("*.log")}
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                log = logs.get(os.readlink(entry / "fd" / "1"))
                if log is not None and b"penstock.worker" in (entry / "cmdline").read_bytes():
                    found.append(RunProcess(log.stem, int(entry.name), _state(entry), log))
            except OSError:  # it has ended, or belongs to another user
                continue
    return sorted(found, key=lambda process: process.name)


def wait_for_orphans(folder: Path, timeout_s: float = ORPHANS_S) -> None:
    """Wait until the workers of a killed controller have ended, since its trainer may still complete a
    checkpoint."""
    deadline = time.monotonic() + timeout_s
    while orphans := processes_of_run(folder):
        if time.monotonic() > deadline:
            named = ", ".join(f"{process.name} (pid {process.pid}, {process.state})" for process in orphans)
            raise UserError(f"workers of the killed run in {folder} are still there: {named}; end them first")
        time.sleep(LOOK_AGAIN_S)


def stacks_of(process: RunProcess) -> str:
    """Return the Python stacks of a worker's threads, the main thread last; "" when it does not write them in
    time."""
    before = process.log.stat().st_size
    try:
        os.kill(process.pid, STACKS)
    except ProcessLookupError:
        return ""
    deadline, size = time.monotonic() + STACKS_S, before
    while time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)
        now = process.log.stat().st_size
        if now > before and now == size:
            break
        size = now
    with process.log.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")


def _state(entry: Path) -> str:
    letter = (entry / "stat").read_text().rpartition(")")[2].split()[0]
    return STATES.get(letter, letter)
