"""Runs work, and cancels it when a process that it needs ends."""

import asyncio
import traceback
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.errors import ChannelClosed, PenstockError, UserError, WorkerDied
from penstock.safe_files import write_private

T = TypeVar("T")

ERROR = "error.txt"
"""In the run folder: the traceback of an unexpected error that ended the run."""

ANSWER_GRACE_S = 10.0
"""How long a worker whose channel has closed may take to end."""


class SupervisedWorker(Protocol):
    """A `SupervisedWorker` reports its own end."""

    async def died(self) -> WorkerDied: ...


async def supervised(work: Coroutine[Any, Any, T], workers: Sequence[SupervisedWorker]) -> T:
    """Return the result of `work`. When a worker ends first, `work` is cancelled and the worker's death is
    raised."""
    working = asyncio.create_task(work)
    death = asyncio.create_task(first_death(workers))
    try:
        await asyncio.wait({working, death}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not _lost_a_worker(working):
            return await unwrapped(working)
        await asyncio.wait({death}, timeout=ANSWER_GRACE_S)
        if death.done():
            raise death.result()
        return await unwrapped(working)  # no worker has died: a channel was closed for another reason
    finally:
        working.cancel()
        death.cancel()
        await asyncio.gather(working, death, return_exceptions=True)


class Gathering:
    """Lets workers that start together wait until all of them have started."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._all_there = asyncio.Event()

    def arrive(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._all_there.set()

    async def wait(self, worker: SupervisedWorker) -> None:
        """Arrive, then wait for the others. Raises the worker's death if it dies before all have started; a
        later death is left to its supervisor."""
        self.arrive()
        try:
            await supervised(self._all_there.wait(), [worker])
        except WorkerDied:
            if not self._all_there.is_set():
                self._missing += 1
                raise


async def first_death(workers: Sequence[SupervisedWorker]) -> WorkerDied:
    if not workers:
        await asyncio.Event().wait()
    watching = [asyncio.create_task(worker.died()) for worker in workers]
    try:
        done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in watching:
            task.cancel()


async def unwrapped(work: Awaitable[T]) -> T:
    """Await `work`, and raise the original error instead of the exception groups around it."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise _innermost(group) from None


async def as_penstock_error(work: Awaitable[T], folder: Path) -> T:
    """Await `work`, and turn an unexpected error into a `PenstockError` that names the file with its traceback."""
    try:
        return await unwrapped(work)
    except PenstockError:
        raise
    except Exception as error:
        file = folder / ERROR
        try:
            write_private(file, "".join(traceback.format_exception(error)))
            where = f"its traceback is in {file}"
        except OSError as failure:
            where = f"its traceback, for {file}, can't be written: {failure.strerror}"
        sentence = f"{type(error).__name__}: {error}; this was not expected, and {where}"
        raise PenstockError(sentence) from error


def _lost_a_worker(work: "asyncio.Task[Any]") -> bool:
    """Return whether the work failed only because a process at the other end of a channel is gone."""
    error = None if work.cancelled() else work.exception()
    return error is not None and isinstance(_innermost(error), ChannelClosed)


def _innermost(error: BaseException) -> BaseException:
    """Return the most telling error inside nested groups: Penstock's own before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_innermost(inner) for inner in error.exceptions]
    for kind in (WorkerDied, UserError, PenstockError):
        for one in found:
            if isinstance(one, kind) and not isinstance(one, ChannelClosed):
                return one
    return found[0]
