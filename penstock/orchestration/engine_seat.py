"""An engine's part in the run: what its loss and its return mean for the pool and for weight sync."""

import asyncio
from collections.abc import Callable

from penstock.engines.engine_pool import EnginePool
from penstock.errors import TrainerLost
from penstock.orchestration.controller import Controller
from penstock.orchestration.workers import LaunchedEngine


class EngineSeat:
    """`penstock.orchestration.revival.Revivable` of one engine."""

    def __init__(
        self,
        engine: LaunchedEngine,
        pool: EnginePool,
        controller: "asyncio.Future[Controller]",
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`controller` is there once it has been built: an engine may die before."""
        self._say = say
        self._engine = engine
        self._pool = pool
        self._controller = controller

    @property
    def is_needed(self) -> bool:
        return self._pool.expects(self._engine.name)

    @property
    def is_replaceable(self) -> bool:
        return True

    def lost(self) -> None:
        """Others go on with its requests."""
        if self._engine.name in self._pool.names:
            self._pool.lose(self._engine.name)

    async def prepare(self) -> None:
        """One that ran out of memory is started with less to hold."""
        self._engine.hold_less(self._say)

    async def returned(self) -> None:
        """The trainer publishes its present weights again, and the engine serves when it has taken them."""
        if not self._controller.done():  # the first update brings it all that there is
            self._pool.enlist(self._engine.name, self._engine.calls)
            await self._pool.wait_serving(self._engine.name)
            return
        controller = self._controller.result()
        while controller.is_ready or self._pool.names:  # else it gets all that the first update brings
            try:
                await controller.bring_below_adapter(self._engine.calls)
                break
            except TrainerLost:
                controller.trainer_lost()
        self._pool.enlist(self._engine.name, self._engine.calls)
        await controller.republish()
        await self._pool.wait_serving(self._engine.name)
