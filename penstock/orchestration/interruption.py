"""From signals to words with a session. Ctrl-C, SIGTERM (a scheduler, `systemctl stop`) and SIGHUP (a closed
terminal) mean the same: the first asks for an orderly end, the second for a quick one, the third does not ask.
Before there is a session, `penstock.cli.early_signals` answers them."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from penstock.orchestration.launchers.signals import LEFT_TO_CONTROLLER

LINES = (
    "{name}: stopping after this step; the model will be saved (once more to hurry)",
    "{name}: hurrying, without a last evaluation; the model will still be saved (once more to end without it)",
    "{name}: ending at once; the model is not saved",
)
LINES_AT_START = (
    "{name}: ending; nothing has been trained since the start, so no model is saved",
    "{name}: still ending, without a model (once more to end at once)",
    LINES[2],
)
LINES_ON_FULL_DISK = (
    "{name}: waiting no longer for room on the disk; the model is tried once more",
    "{name}: waiting no longer for room on the disk; the model is tried once more",
    LINES[2],
)


class Stoppable(Protocol):
    @property
    def has_begun(self) -> bool:
        """Whether it trains: before, there is nothing to save."""

    @property
    def waits_for_room(self) -> bool:
        """Whether the model is not saved yet only because the disk is full."""

    def stop(self) -> None: ...

    def hurry(self) -> None: ...


@contextmanager
def asking(session: Stoppable, log: Callable[[str], None], *, end: Callable[[], object]) -> Iterator[None]:
    """While the block runs in the main thread's event loop, signals are requests to the session."""
    answer = _answers(session, log, end)
    loop = asyncio.get_running_loop()
    taken = _answerable()
    for number in taken:
        loop.add_signal_handler(number, answer, number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


@contextmanager
def asking_from_a_thread(
    session: Stoppable, log: Callable[[str], None], *, end: Callable[[], object]
) -> Iterator[None]:
    """The same where the session runs in another thread, and the main thread only waits for it."""
    answer = _answers(session, log, end)

    def handle(number: int, frame: FrameType | None) -> None:
        answer(signal.Signals(number))

    with _handled_by(handle):
        yield


def _answers(
    session: Stoppable, log: Callable[[str], None], end: Callable[[], object]
) -> Callable[[signal.Signals], None]:
    count = 0

    def answer(number: signal.Signals) -> None:
        nonlocal count
        asks = (session.stop, session.hurry, end)
        lines = LINES if session.has_begun else LINES_AT_START
        if session.waits_for_room:
            lines = LINES_ON_FULL_DISK
        ask, line = asks[min(count, 2)], lines[min(count, 2)]
        count += 1
        ask()  # before the line: whatever becomes of that
        log(line.format(name=_name(number)))

    return answer


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _answerable()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _answerable() -> list[signal.Signals]:
    """Only the main thread may set handlers, and what was ignored when we started (`nohup`) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in LEFT_TO_CONTROLLER if signal.getsignal(number) is not signal.SIG_IGN]


def _name(number: signal.Signals) -> str:
    return "Ctrl-C" if number is signal.SIGINT else number.name
