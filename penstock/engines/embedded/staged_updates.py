"""Fetches updates in a thread while the engine generates, and keeps them until they are loaded."""

import asyncio
import time
from dataclasses import dataclass

from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged, WeightReceiver


@dataclass(frozen=True, slots=True)
class Fetched:
    """Holds an update that is ready to be loaded, and how long fetching took: 0 where it is read in place."""

    staged: Staged
    stage_s: float


class StagedUpdates:
    """Stages updates through `receiver`. At most one is kept: a second replaces it."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._kept: Fetched | None = None

    async def keep(self, update: WeightUpdate) -> None:
        """Fetch an update and keep it for `fetch`. A broadcast is received again even if it is kept, since its
        sender waits for every engine."""
        if update.sends:
            self.close()
        self._kept = await self.fetch(update)

    async def fetch(self, update: WeightUpdate) -> Fetched:
        """Return the update: the kept one if it is the same, else fetched now, after dropping what was kept."""
        kept, self._kept = self._kept, None
        if kept is not None and _identity(kept.staged.update) == _identity(update):
            return kept
        if kept is not None:
            self._receiver.drop(kept.staged)
        if not self._receiver.stages(update):
            return Fetched(self._receiver.stage(update), 0.0)
        started = time.perf_counter()
        staged = await self._stage(update)
        return Fetched(staged, time.perf_counter() - started)

    def close(self) -> None:
        if self._kept is not None:
            self._receiver.drop(self._kept.staged)
            self._kept = None

    async def _stage(self, update: WeightUpdate) -> Staged:
        """Stage the update in a thread. Cancelling this cancels the receiver too, and the thread's result is
        dropped."""
        receiver = self._receiver
        staging = asyncio.get_running_loop().run_in_executor(None, receiver.stage, update)
        try:
            return await asyncio.shield(staging)
        except asyncio.CancelledError:
            staging.add_done_callback(self._drop_unwanted)
            receiver.cancel()
            raise

    def _drop_unwanted(self, staging: "asyncio.Future[Staged]") -> None:
        if not staging.cancelled() and staging.exception() is None:
            self._receiver.drop(staging.result())


def _identity(update: WeightUpdate) -> tuple[object, ...]:
    """Return what tells two updates apart: the same version may be published again, whole instead of as a delta."""
    return (update.policy, update.version, update.transport, update.selection, update.base, update.buckets)
