"""Ends what a server that was killed has left behind.

vLLM's engine and its workers are processes of their own. When their server is killed they go on, and keep its
memory. Each server gets a mark in its environment, which they inherit, so they can be found.
"""

import contextlib
import os
import signal
from pathlib import Path

MARK = "PENSTOCK_SERVER"
"""The environment variable that holds a server's mark."""


def marked(mark: str, processes: Path = Path("/proc")) -> list[int]:
    """The processes with this mark, but for this one. None where the system does not tell."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return sorted(found)


def end_leftovers(mark: str) -> int:
    """Kill them; returns how many there were."""
    found = marked(mark)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(found)
