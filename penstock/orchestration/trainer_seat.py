"""The trainer's part in the run: another process goes on from the last checkpoint, or from the start.

Generation goes on meanwhile, and the buffer fills as far as the staleness bound allows.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.orchestration.checkpoints import newest_whole
from penstock.orchestration.controller import Controller
from penstock.orchestration.kept_checkpoints import put_aside_past, sweep_unfinished
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.workers import LaunchedTrainer


class TrainerSeat:
    """`penstock.orchestration.revival.Revivable` of the trainer."""

    is_needed = True

    def __init__(
        self,
        trainer: LaunchedTrainer,
        prepared: Prepared,
        controller: "asyncio.Future[Controller]",
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`controller` is there once it has been built: a trainer may die before."""
        self._say = say
        self._trainer = trainer
        self._prepared = prepared
        self._controller = controller
        self._step = 0
        self._consumed: tuple[tuple[int, int], ...] = ()

    @property
    def is_replaceable(self) -> bool:
        """After the last step nobody would make again what a new process lacks."""
        return not self._controller.done() or self._controller.result().is_training

    def lost(self) -> None:
        if self._controller.done():
            self._controller.result().trainer_lost()

    async def prepare(self) -> None:
        """Tell the next process from where it goes on, and under which version its weights are published."""
        controller = await asyncio.shield(self._controller)
        controller.trainer_lost()
        death = self._trainer.place.last_death
        if death is not None and death.out_of_memory and (word := controller.shrink_steps()):
            self._say(word)
        version = await controller.pause()
        sweep_unfinished(self._prepared.folder)
        checkpoint = await self._choose(self._prepared.folder)
        start = msgspec.structs.replace(self._trainer.start, version=version, checkpoint=checkpoint)
        self._trainer.place.begin_with(start)

    async def _choose(self, run: Path) -> str:
        """The newest checkpoint that is whole; "" where there are none yet."""
        words: list[str] = []
        found = await asyncio.to_thread(newest_whole, run, words.append)
        for word in words:
            self._say(word)
        if found is None:
            self._step, self._consumed = 0, ()
            return ""
        path, progress = found
        self._step, self._consumed = progress.step, progress.consumed
        put_aside_past(run, progress.step)
        return str(path)

    async def returned(self) -> None:
        controller = await asyncio.shield(self._controller)
        await controller.roll_back(self._step, self._consumed)
