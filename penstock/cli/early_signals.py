"""Ends a command with a sentence on a signal: while libraries are imported and tasks are read, and in commands
that have nothing to save. A run handles signals itself (`penstock.run.interruption`).

It imports nothing heavy, so that signals are handled from the first line on.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(PenstockError):
    """A signal has ended the command. typer would swallow a `KeyboardInterrupt` without a message."""


@contextmanager
def stopping_on_signals(sentence: str) -> Iterator[None]:
    """Handle signals around a whole command. A session inside sets its own handlers, and removes them when it
    has ended."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in _answerable()}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise Stopped(sentence) from interrupt
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _answerable() -> list[signal.Signals]:
    """Return the signals to handle: only the main thread may set handlers, and a signal that was ignored at the
    start (`nohup`) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
