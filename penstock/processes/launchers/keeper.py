"""Cleans up after a killed controller: `python keeper.py FOLDER`, started by the local launcher.

Workers end by themselves when their channel closes, unless they are inside a call that never returns;
programs that a reward started know nothing of channels. The keeper reads the workers' process groups from a
pipe. When the pipe closes without a goodbye, the controller was killed: workers get `GRACE_S` to end, then
their process groups are killed and the private folder is removed. The keeper uses only the standard library,
so that it starts in milliseconds and needs little memory.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

GRACE_S, LOOK_AGAIN_S = 3.0, 0.05
GOODBYE = "goodbye"


class Keeper:
    """Starts the keeper process, and reports the workers' process groups to it."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        self._say(f"{group}\n")

    def close(self) -> None:
        """Tell the keeper that the launcher has ended its workers itself. Idempotent."""
        self._say(GOODBYE)
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            pipe.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # the keeper was killed; nothing else depends on it
            pipe.write(line.encode())
            pipe.flush()


def end_group(group: int) -> None:
    """Kill every process of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _keep(lines: Iterable[str], folder: str) -> None:
    groups = []
    for line in lines:
        if line.strip() == GOODBYE:
            return
        groups.append(int(line))
    until = time.monotonic() + GRACE_S
    while any(map(_lives, groups)) and time.monotonic() < until:
        time.sleep(LOOK_AGAIN_S)
    for group in groups:
        end_group(group)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    _keep(sys.stdin, sys.argv[1])
