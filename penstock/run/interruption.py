"""Ends a run before its last step: by a signal, by a request, or past an engine that does not answer.

Ctrl-C, SIGTERM (a scheduler, `systemctl stop`) and SIGHUP (a closed terminal) mean the same. The first asks
for an orderly end (`stop`) and the second for a quick one (`cancel`); both save the model. The third ends the
run at once. Before there is a run, `penstock.cli.early_signals` handles them.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar

from penstock.errors import ChannelClosed
from penstock.processes.launchers.signals import LEFT_TO_CONTROLLER
from penstock.records.interfaces import Engine

LINES = (
    "{name}: stopping after this step; the model will be saved (again to stop sooner)",
    "{name}: stopping sooner, without a last evaluation; the model will still be saved (again to stop without it)",
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
        """Return whether it trains: before that, there is nothing to save."""

    @property
    def waits_for_room(self) -> bool:
        """Return whether only a full disk keeps the model from being saved."""

    def stop(self) -> None: ...

    def cancel(self) -> None: ...


@contextmanager
def asking(run: Stoppable, log: Callable[[str], None], *, end: Callable[[], object]) -> Iterator[None]:
    """Turn signals into requests to the run while the block runs, in the main thread's event loop."""
    answer = _answers(run, log, end)
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
    run: Stoppable, log: Callable[[str], None], *, end: Callable[[], object]
) -> Iterator[None]:
    """Turn signals into requests to a run in another thread, while the main thread only waits for it."""
    answer = _answers(run, log, end)

    def handle(number: int, frame: FrameType | None) -> None:
        answer(signal.Signals(number))

    with _handled_by(handle):
        yield


def _answers(
    run: Stoppable, log: Callable[[str], None], end: Callable[[], object]
) -> Callable[[signal.Signals], None]:
    count = 0

    def answer(number: signal.Signals) -> None:
        nonlocal count
        asks = (run.stop, run.cancel, end)
        lines = LINES if run.has_begun else LINES_AT_START
        if run.waits_for_room:
            lines = LINES_ON_FULL_DISK
        ask, line = asks[min(count, 2)], lines[min(count, 2)]
        count += 1
        ask()  # before the line, whose output may fail
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
    """Return the signals to handle: none outside the main thread, and none that was ignored at the start
    (`nohup`)."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in LEFT_TO_CONTROLLER if signal.getsignal(number) is not signal.SIG_IGN]


def _name(number: signal.Signals) -> str:
    return "Ctrl-C" if number is signal.SIGINT else number.name


T = TypeVar("T")

ANSWER_S = 15.0
"""How long an engine may take to answer `report` once the run is to stop. Engines answer beside their work."""


class RunCancelled(Exception):
    """The work was cancelled because its run must end now."""


class Ending:
    """Keeps the requests to end a run. They may come at any time, from any thread."""

    def __init__(self) -> None:
        self._is_stopped = self._is_cancelled = False
        self._stopped = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        """Let requests wake the waiters of the running event loop from now on."""
        self._loop = asyncio.get_running_loop()
        if self._is_stopped:
            self._stopped.set()
        if self._is_cancelled:
            self._cancelled.set()

    def stop(self) -> None:
        """Ask for an orderly end."""
        self._is_stopped = True
        self.call(self._stopped.set)

    def cancel(self) -> None:
        """Ask for an end now, with what was trained so far."""
        self._is_stopped = self._is_cancelled = True
        self.call(self._stopped.set)
        self.call(self._cancelled.set)

    async def unless_cancelled(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the run is cancelled first, `work` is cancelled and `RunCancelled`
        raised."""
        working, cancelled = asyncio.create_task(work), asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait({working, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise RunCancelled
        finally:
            working.cancel()
            cancelled.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)

    async def cancel_past_frozen(
        self, engines: Callable[[], Sequence[Engine]], log: Callable[[str], None]
    ) -> None:
        """Once the run is to stop, cancel it if an engine does not answer."""
        await self._stopped.wait()
        while True:
            for engine in engines():
                if not await _is_answering(engine):
                    log(f"an engine has not answered for {ANSWER_S:.0f} s; the run ends without it")
                    self.cancel()
                    return
            await asyncio.sleep(1.0)

    def call(self, function: Callable[[], Any]) -> bool:
        """Call `function` in the loop's thread. Return False, without a call, where the run has no loop."""
        if self._loop is None or self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(function)
        return True


async def _is_answering(engine: Engine) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            await engine.report()
    except TimeoutError:
        return False
    except ChannelClosed:
        pass  # its supervisor reports why it ended
    return True
