"""Threads in which the journal of a run is written, and no others."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from penstock.buffer.journal.journal import Runner


@contextmanager
def writing_threads() -> Iterator[Runner]:
    """A run whose other threads are all busy still gets its records on the disk. One thread writes the journal, the
    other copies blobs."""
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="journal") as pool:

        async def run(work: Callable[[], None]) -> None:
            await asyncio.get_running_loop().run_in_executor(pool, work)

        yield run
