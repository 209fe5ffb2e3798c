"""How a run ends before its last step: asked to stop, asked to hurry, or with an error. The model is saved in each
case, whenever its trainer lives."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from penstock.errors import ChannelClosed
from penstock.interfaces import Engine

T = TypeVar("T")

ANSWER_S = 15.0
"""How long an engine may take to say how it is, once the run is to stop. Engines answer beside their work."""


class Hurried(Exception):
    """The work was given up because its run is to end now."""


class Ending:
    """What a run was asked. Requests may come at any time, from any thread."""

    def __init__(self) -> None:
        self._is_stopped = self._is_hurried = False
        self._stopped = asyncio.Event()
        self._hurried = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        """From now on requests wake whoever waits in the running loop."""
        self._loop = asyncio.get_running_loop()
        if self._is_stopped:
            self._stopped.set()
        if self._is_hurried:
            self._hurried.set()

    def stop(self, then: Callable[[], None]) -> None:
        """End in order. `then` is called in the loop's thread."""
        self._is_stopped = True
        self.call(self._stopped.set)
        self.call(then)

    def hurry(self) -> None:
        """End now, with what there is."""
        self._is_stopped = self._is_hurried = True
        self.call(self._stopped.set)
        self.call(self._hurried.set)

    async def unless_hurried(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; `Hurried` when it was given up."""
        working, hurry = asyncio.create_task(work), asyncio.create_task(self._hurried.wait())
        try:
            await asyncio.wait({working, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Hurried
        finally:
            working.cancel()
            hurry.cancel()
            await asyncio.gather(working, hurry, return_exceptions=True)

    async def hurry_past_frozen(
        self, engines: Callable[[], Sequence[Engine]], log: Callable[[str], None]
    ) -> None:
        """Once the run is to stop, don't wait for an engine that does not answer."""
        await self._stopped.wait()
        while True:
            for engine in engines():
                if not await _answers(engine):
                    log(f"an engine has not answered for {ANSWER_S:.0f} s; the run ends without it")
                    self.hurry()
                    return
            await asyncio.sleep(1.0)

    def call(self, function: Callable[[], Any]) -> bool:
        """In the loop's thread; False where no loop runs the session, and nothing is called."""
        if self._loop is None or self._loop.is_closed():
            return False
        self._loop.call_soon_threadsafe(function)
        return True


async def _answers(engine: Engine) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            await engine.report()
    except TimeoutError:
        return False
    except ChannelClosed:
        pass  # whoever supervises it says what became of it
    return True
