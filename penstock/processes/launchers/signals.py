"""Handles the signals that end a run. A scheduler or a terminal sends them to every process of a job; only the
controller acts on them, and it tells its workers what to do."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEFT_TO_CONTROLLER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STACKS = signal.SIGUSR1
"""A worker that gets this writes the Python stacks of its threads into its log, and continues."""


@contextmanager
def held() -> Iterator[None]:
    """Block these signals while workers start. A worker inherits the block, so a signal waits until the worker
    has a handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_CONTROLLER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_handlers() -> None:
    """Set Python's handlers again after a library has installed its own below them. Ray's end the process 3 s
    after a SIGTERM."""
    if threading.current_thread() is threading.main_thread():
        for number in LEFT_TO_CONTROLLER:
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def leave_to_controller() -> None:
    """Ignore these signals in a worker with handlers that do nothing.

    `SIG_IGN` would be inherited by programs that a reward starts, which then could not be ended by a signal.
    """
    for number in LEFT_TO_CONTROLLER:
        signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_CONTROLLER)
    os.register_at_fork(after_in_child=_as_usual)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _as_usual() -> None:
    for number in LEFT_TO_CONTROLLER:
        signal.signal(number, signal.SIG_DFL)
