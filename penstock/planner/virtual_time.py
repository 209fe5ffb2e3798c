"""Provides an event loop whose clock jumps: asyncio code that waits for hours runs in milliseconds.

The controller is written against `loop.time()` and interfaces alone, so the same controller runs here against
simulated engines and trainers. When every coroutine waits and no timer is set, nothing can ever happen again:
that is a deadlock, and it is raised instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every coroutine waits for another one."""


class _JumpingSelector(selectors.SelectSelector):
    """Moves the clock to the next timer instead of sleeping until then."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing is scheduled: every coroutine waits for another one")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call the function at once, since there are no threads in virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, on a jumping clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
