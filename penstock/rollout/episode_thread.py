"""Runs a coroutine in its own thread and event loop, so that blocking code in it stops nothing else."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from penstock.records import Chunk, GenerateRequest
from penstock.rollout.episode_rollout import TokenSource

T = TypeVar("T")


async def run_in_thread(begin: Callable[[], Coroutine[Any, Any, T]], *, name: str) -> T:
    """Return the result of `begin()`, run in a thread. Cancelling the caller cancels the work as soon as its
    loop runs again. A thread that blocks is left behind, and its result is discarded."""
    here = asyncio.get_running_loop()
    answer: asyncio.Future[T] = here.create_future()
    there: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    is_left = False

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        there.append((asyncio.get_running_loop(), task))
        if is_left:
            raise asyncio.CancelledError
        return await begin()

    def work() -> None:
        result, failure = None, None
        try:
            result = asyncio.run(main())
        except BaseException as error:
            failure = RuntimeError("the thread's work was cancelled") if _is_exit(error) else error
        # The caller's loop may have been closed meanwhile; then the result is not needed.
        with contextlib.suppress(RuntimeError):
            here.call_soon_threadsafe(settle, result, failure)

    # A daemon: a call that hangs must not keep the process from ending.
    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        return await answer
    finally:
        is_left = True
        for loop, task in there:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)


class CrossLoopEngine:
    """Lets coroutines of another thread generate with an engine. Requests run on the engine's own loop, and the
    chunks of a turn arrive together when it has ended."""

    def __init__(self, engine: TokenSource, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        collecting = asyncio.run_coroutine_threadsafe(self._collect(request), self._loop)
        for chunk in await asyncio.wrap_future(collecting):
            yield chunk

    async def _collect(self, request: GenerateRequest) -> list[Chunk]:
        async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
            return [chunk async for chunk in chunks]


def _is_exit(error: BaseException) -> bool:
    """Return whether raising this error in the caller would cancel or end it."""
    return isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit)
