"""Signals that nobody else answers: while libraries are imported and tasks are read, and in commands that have
nothing to save, each ends the command with a sentence. A run answers them itself
(`penstock.run.interruption`).

It imports nothing heavy, so that signals are answered from the first line on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(PenstockError):
    """A signal has ended the command. typer would swallow a `KeyboardInterrupt`, and say nothing."""


@contextmanager
def ending_at_once(sentence: str) -> Iterator[None]:
    """Around a whole command. A session sets handlers of its own, and takes them away when it has ended."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in _answerable()}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise Stopped(sentence) from interrupt
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _answerable() -> list[signal.Signals]:
    """Only the main thread may set handlers, and what was ignored when we started (`nohup`) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
