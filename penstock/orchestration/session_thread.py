"""A session beside a loop that is not its own: in a thread, for callers who block inside a loop (a cell of a
notebook), or in the caller's loop, as a task that is cancelled in order."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from penstock.orchestration.interruption import Stoppable, asking_from_a_thread
from penstock.orchestration.summary import Summary


class Runnable(Stoppable, Protocol):
    async def run(self) -> Summary: ...


def run_in_thread(session: Runnable, log: Callable[[str], None]) -> Summary:
    """A loop of its own in a thread. An interrupt of the caller asks for an orderly end, the second for a
    quick one, and both get the summary; the third does not ask."""
    outcome: Future[Summary] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Summary]]] = Future()

    async def run() -> Summary:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await session.run()

    def work() -> None:
        try:
            outcome.set_result(asyncio.run(run()))
        except BaseException as error:
            outcome.set_exception(error)

    def end() -> None:
        loop, task = started.result()
        loop.call_soon_threadsafe(task.cancel)

    with asking_from_a_thread(session, log, end=end):
        threading.Thread(target=work, name="penstock").start()
        return _result(outcome)


def _result(outcome: "Future[Summary]") -> Summary:
    try:
        return outcome.result()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def run_until_cancelled(session: Runnable) -> Summary:
    """In this loop. A cancellation waits until the model is saved; a second one does not."""
    running = asyncio.create_task(session.run())
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if running.done():
            raise
        session.hurry()
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled() and (error := running.exception()) is not None:
            raise error from None
        raise
