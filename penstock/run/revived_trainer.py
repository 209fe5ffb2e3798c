"""Replaces a lost trainer: another process resumes from the last checkpoint, or from the start.

Generation continues meanwhile, and the buffer fills as far as the staleness bound allows.
"""

import asyncio
from pathlib import Path

import msgspec

from penstock.durability.checkpoints import newest_whole
from penstock.durability.kept_checkpoints import put_aside_past, sweep_unfinished
from penstock.loop.controller import Controller
from penstock.observe.recorder import Recorder
from penstock.run.workers import LaunchedTrainer


class RevivableTrainer:
    """Implements `penstock.processes.revival.Revivable` for the trainer."""

    is_needed = True

    def __init__(self, trainer: LaunchedTrainer, run: Path, controller: Controller, events: Recorder) -> None:
        self._trainer = trainer
        self._run = run
        self._controller = controller
        self._events = events
        self._step = 0
        self._consumed: tuple[tuple[int, int], ...] = ()

    @property
    def is_replaceable(self) -> bool:
        """Return whether training continues: after its end, the steps since the last checkpoint could not be
        made again."""
        return self._controller.is_training

    def lost(self) -> None:
        self._controller.trainer_lost()

    async def prepare(self) -> None:
        """Set where the next process resumes, and under which version it publishes its weights."""
        controller, place = self._controller, self._trainer.place
        controller.trainer_lost()
        death = place.last_death
        if death is not None and death.out_of_memory and (word := controller.shrink_steps()):
            self._events.log(word)
        version = await controller.pause()
        sweep_unfinished(self._run)
        checkpoint = await self._choose()
        start = msgspec.structs.replace(self._trainer.start, version=version, checkpoint=checkpoint)
        place.set_start(start)

    async def _choose(self) -> str:
        """Return the newest checkpoint that is whole; "" where there is none yet."""
        words: list[str] = []
        found = await asyncio.to_thread(newest_whole, self._run, words.append)
        for word in words:
            self._events.log(word)
        if found is None:
            self._step, self._consumed = 0, ()
            return ""
        path, progress = found
        self._step, self._consumed = progress.step, progress.consumed
        put_aside_past(self._run, progress.step)
        return str(path)

    async def returned(self) -> None:
        await self._controller.roll_back(self._step, self._consumed)
