"""Orders processes on a crowded machine: first those that answer heartbeats, then workers that start, then
others.

A worker that starts has seconds of imports before it, and others wait for it. Raising a priority needs a
right that root has (`CAP_SYS_NICE`); without it nothing changes.
"""

import contextlib
import os
from pathlib import Path

ANSWERING = -15
STARTING = -10
AS_OTHERS = 0
_THREADS = Path("/proc/self/task")
_AUTOGROUP = Path("/proc/self/autogroup")
"""Linux groups processes by session here. Niceness counts only within a group, and the group has its own."""


def set_niceness(niceness: int) -> None:
    """Set the niceness of this process and all its threads, and of its session if it leads one."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with contextlib.suppress(OSError):
        for thread in os.listdir(_THREADS):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
    with contextlib.suppress(OSError):
        if os.getsid(0) == os.getpid():
            _AUTOGROUP.write_text(str(niceness))


class RaisedPriority:
    """Raises this process's priority until `end`, unless it was started with a lower one (`nice`)."""

    def __init__(self) -> None:
        self._before = os.getpriority(os.PRIO_PROCESS, 0)
        self._is_first = self._before <= AS_OTHERS
        if self._is_first:
            set_niceness(min(self._before, STARTING))

    def end(self) -> None:
        """Restore the priority. Idempotent."""
        if self._is_first:
            self._is_first = False
            set_niceness(self._before)
