"""Work, and a watch on the processes that it can't do without."""

import asyncio
import traceback
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.errors import ChannelClosed, PenstockError, UserError, WorkerDied
from penstock.safe_files import write_private

T = TypeVar("T")

ERROR = "error.txt"
"""In the run folder: the traceback of an error that ended the run and is not one of ours."""

LAST_WORDS_S = 10.0
"""How long a worker whose channel has closed may take to end."""


class SupervisedWorker(Protocol):
    """A worker whose end others must hear of."""

    async def died(self) -> WorkerDied: ...


async def supervised(work: Coroutine[Any, Any, T], workers: Sequence[SupervisedWorker]) -> T:
    """The result of `work`; when one of the workers ends, the work is cancelled and that end is raised."""
    working = asyncio.create_task(work)
    death = asyncio.create_task(first_death(workers))
    try:
        await asyncio.wait({working, death}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not _lost_a_worker(working):
            return await unwrapped(working)
        await asyncio.wait({death}, timeout=LAST_WORDS_S)
        if death.done():
            raise death.result()
        return await unwrapped(working)  # no worker has died: a channel was closed for another reason
    finally:
        working.cancel()
        death.cancel()
        await asyncio.gather(working, death, return_exceptions=True)


class Gathering:
    """Workers that start together: each that has started waits until all have."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._all_there = asyncio.Event()

    def arrive(self) -> None:
        """One more has started."""
        self._missing -= 1
        if not self._missing:
            self._all_there.set()

    async def wait(self, worker: SupervisedWorker) -> None:
        """Raises the worker's death before the others were there; a later one is for its supervisor."""
        self.arrive()
        try:
            await supervised(self._all_there.wait(), [worker])
        except WorkerDied:
            if not self._all_there.is_set():
                self._missing += 1
                raise


async def first_death(workers: Sequence[SupervisedWorker]) -> WorkerDied:
    """Wait until any of them ends, which none should."""
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
    """Raise what happened instead of the groups that carried it here."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise _innermost(group) from None


async def in_a_sentence(work: Awaitable[T], folder: Path) -> T:
    """An error that is not ours becomes one of ours: a sentence that names the file with its traceback."""
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
    """Whether the work failed only because a process at the other end of a channel is gone."""
    error = None if work.cancelled() else work.exception()
    return error is not None and isinstance(_innermost(error), ChannelClosed)


def _innermost(error: BaseException) -> BaseException:
    """The most telling error inside nested groups: ours before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_innermost(inner) for inner in error.exceptions]
    for kind in (WorkerDied, UserError, PenstockError):
        for one in found:
            if isinstance(one, kind) and not isinstance(one, ChannelClosed):
                return one
    return found[0]
