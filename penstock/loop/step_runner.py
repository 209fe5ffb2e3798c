"""Runs one optimizer step on every rank: plans it, runs the plans, and leaves out groups whose bulk data is
lost."""

import dataclasses

from penstock.errors import BlobLost, StepTooLarge, TrainerLost
from penstock.loop.admission import StepGroups
from penstock.loop.edges import LoopEvents, Ranks
from penstock.loop.group_production import LOST_BLOB
from penstock.loop.rollout_buffer import RolloutBuffer
from penstock.loop.step_planner import StepPlanner
from penstock.records import StepResult, group_scope
from penstock.records.blob_refs import check_group
from penstock.records.interfaces import BlobStore

LOST_STEPS = 3
"""This many steps in a row that lose all their groups end a run: single groups are not the cause then."""
LEAST_TOKENS = 256
"""A micro-batch is not halved below this, where nothing is won. A longer sequence is a micro-batch by itself."""


class StepRunner:
    """Runs each step on the trainers. Groups whose blobs are lost are dropped from it."""

    def __init__(
        self,
        *,
        trainers: Ranks,
        planner: StepPlanner,
        buffer: RolloutBuffer,
        blobs: BlobStore,
        events: LoopEvents,
    ) -> None:
        self._trainers = trainers
        self._planner = planner
        self._buffer = buffer
        self._blobs = blobs
        self._events = events
        self._num_lost_in_a_row = 0

    async def run(self, taken: StepGroups, version: int | None) -> tuple[StepGroups, list[StepResult]]:
        """Train, and return the groups that were trained and what each rank reports. `version` is what the new
        weights are published as, or None. The returned step is empty if the blobs of all its groups were
        lost: nothing was trained then."""
        while True:
            try:
                with self._events.measure("train", "plan", step=taken.step + 1):
                    plans = self._planner.plan(taken, self._buffer.gate.history, version)
                results = await self._trainers.run(plans)
                self._num_lost_in_a_row = 0
                return taken, results
            except StepTooLarge as error:
                self._shrink_or_raise(error, "the step is tried again")
            except TrainerLost as error:
                if isinstance(error.__cause__, StepTooLarge):  # one rank had no room: all restart
                    self._shrink_or_raise(error.__cause__, "its ranks begin again from the last checkpoint")
                raise
            except BlobLost as error:  # the trainer reads all blobs of a step before it trains on any
                taken = await self._without_lost(taken, error)
                if not taken.groups:
                    return taken, []

    def shrink(self) -> str | None:
        """Halve the micro-batches from now on, which does not change gradients. Returns a sentence about it, or
        None where they can't be halved."""
        before = self._planner.micro_batch_tokens
        if before // 2 < LEAST_TOKENS:
            return None
        self._planner = dataclasses.replace(self._planner, micro_batch_tokens=before // 2)
        return f"trainer.micro_batch_tokens is {before // 2} from now on, instead of {before}"

    def _shrink_or_raise(self, error: StepTooLarge, then: str) -> None:
        word = self.shrink()
        if word is None:
            raise error
        self._events.log(f"{error}; {word}, and {then}")

    async def _without_lost(self, taken: StepGroups, error: BlobLost) -> StepGroups:
        """Drop from the step the groups whose blobs can't be read. Raises the error when all blobs can be read,
        or when several steps in a row lose all their groups: then single groups are not the cause."""
        lost = {}
        for group in taken.groups:
            try:
                check_group(self._blobs, group.scored.group, read=True)
            except BlobLost as reason:
                lost[group.ticket.number] = (group.scored, str(reason))
            else:
                # Routes of another model are whole, and only the trainer knows its model: it names the blob.
                if f"blob {group_scope(group.ticket.number)}/" in str(error):
                    lost[group.ticket.number] = (group.scored, str(error))
        if not lost:
            raise error
        if len(lost) == len(taken.groups):
            self._num_lost_in_a_row += 1
            if self._num_lost_in_a_row >= LOST_STEPS:
                raise error
        for number, (scored, message) in lost.items():
            await self._buffer.drop(scored.group, LOST_BLOB, message, scored.scores)
            taken = taken.without(number)
        return taken
