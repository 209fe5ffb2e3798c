"""When a worker is no longer there: its process has ended, its connection broke, or it is frozen and was ended."""

import asyncio
from collections.abc import Callable

from penstock.errors import WorkerDied
from penstock.orchestration.freezing import STEP_S, Silence
from penstock.orchestration.replaceable import ReplaceableWorker
from penstock.orchestration.worker_events import EventCollector


class Absence:
    """Watches the process that is in a place now."""

    def __init__(
        self,
        place: ReplaceableWorker,
        now: Callable[[], float],
        *,
        pulses: EventCollector | None = None,
        freeze_s: float = 0.0,
    ) -> None:
        """A worker that is silent for longer than `freeze_s`, and than it declared, is frozen; 0: none ever is."""
        self._place = place
        self._now = now
        self._pulses = pulses if freeze_s else None
        self._freeze_s = freeze_s

    async def wait(self) -> WorkerDied:
        """Until it ends, or is ended because it is frozen."""
        freezing = asyncio.ensure_future(self._frozen())
        dying = asyncio.ensure_future(self._place.gone())
        try:
            await asyncio.wait({freezing, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                return dying.result()
            await self._place.give_up(
                f"worker {self._place.name} is frozen, so it was ended: {freezing.result()}"
            )
            return await dying
        finally:
            for task in (freezing, dying):
                task.cancel()
            await asyncio.gather(freezing, dying, return_exceptions=True)

    async def _frozen(self) -> str:
        """Wait until it is, and say why."""
        if self._pulses is None:
            await asyncio.Event().wait()
        assert self._pulses is not None
        channel = self._place.channel
        answers, report = self._pulses.pulse(channel)
        silence = Silence(self._freeze_s, self._now(), report)
        while True:
            await asyncio.sleep(STEP_S)
            heard, report = self._pulses.pulse(channel)
            if heard != answers:
                answers = heard
                silence.hear(self._now(), report)
            why = silence.look(self._now())
            if why is not None:
                return why
