"""Work on one thing while the next is being fetched."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def one_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map`, with the next call under way in a thread while the caller works on a result: packing, transfer and
    unpacking overlap, and two results exist at once. Leaving early waits for the call under way."""
    remaining = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        pending = [thread.submit(function, item) for item in _first(remaining)]
        while pending:
            result = pending.pop().result()
            pending = [thread.submit(function, item) for item in _first(remaining)]
            yield result


def _first(items: Iterator[Item]) -> Iterator[Item]:
    """The next one, if there is one."""
    for item in items:
        yield item
        return
