"""Produces groups, the left half of the loop: from a task to a scored group in the buffer.

    feed ─ admit ─► produce: rollout ─ score ─► buffer

A failure drops only its group, with a reason.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.algorithms.selection import select
from penstock.errors import BlobLost, RolloutFailed, ScoringFailed, UserError
from penstock.loop.admission import NO_VERSIONS, Ticket
from penstock.loop.attempt_records import EpisodeEnded, GroupGenerated
from penstock.loop.edges import GroupRunner, LoopEvents
from penstock.loop.failure_streak import FailureStreak
from penstock.loop.group_scoring import GroupScoring
from penstock.loop.resume import Resume
from penstock.loop.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.records import Episode, Group, IntArray, PartialGroup, ScoredGroup, Task
from penstock.records.blob_refs import check_group
from penstock.records.interfaces import BlobStore, Scorer

LOST_BLOB = "lost_blob"
"""Drop reason of a group whose bulk data can't be written or read back."""


class TaskSource(Protocol):
    """Gives production its tasks (`penstock.tasks.stream.TaskStream` is one)."""

    def next(self) -> Task: ...

    def put_back(self, task: Task) -> None: ...

    def task(self, task_id: str) -> Task: ...

    @property
    def num_taken(self) -> int:
        """Return how many new tasks were taken so far; one that was put back and taken again counts once."""


class GroupProduction:
    """Starts groups as the buffer admits them, and brings each to the buffer or to a counted drop."""

    def __init__(
        self,
        *,
        runner: GroupRunner,
        scorer: Scorer,
        tasks: TaskSource,
        buffer: RolloutBuffer,
        selection: Mapping[str, Mapping[str, Any]],
        max_filtered_in_a_row: int = 512,
        failures: FailureStreak,
        blobs: BlobStore,
        events: LoopEvents,
        resume: Resume | None = None,
    ) -> None:
        """`resume` has the groups that were under way before a restart."""
        self._runner = runner
        self._scorer = scorer
        self._tasks = tasks
        self._buffer = buffer
        self._selection = selection
        self._max_filtered = max_filtered_in_a_row
        self._filtered_in_a_row = 0
        self._failures = failures
        self._blobs = blobs
        self._events = events
        self._resume = resume
        self._partial = dict(resume.partial) if resume is not None else {}
        """What resumed groups had done."""
        self._producing: set[asyncio.Task[None]] = set()

    async def feed(self, background: asyncio.TaskGroup) -> None:
        """Start groups until the buffer closes: first those that were under way before a restart, then as many
        as may be admitted."""
        try:
            if self._resume is not None:
                await self._resume_groups(background, self._resume)
            while True:
                start, reason = self._events.now(), self._buffer.waiting_for()[0]
                ticket = await self._buffer.admit()
                self._events.admission_blocked(start, reason)
                task = self._tasks.next()
                await self._buffer.start(ticket, task, self._tasks.num_taken)
                self._start_group(background, ticket, task)
        except BufferClosed:
            return

    async def _resume_groups(self, background: asyncio.TaskGroup, resume: Resume) -> None:
        for lost in resume.lost:
            await self._buffer.drop(lost.group, lost.reason, lost.message, lost.scores)
        for held in resume.gate.running:
            ticket = await self._buffer.readmit(held, self._kept_versions(held.number))
            self._start_group(background, ticket, self._tasks.task(resume.task_ids[held.number]))

    def cancel(self) -> None:
        """Abandon the groups under way."""
        for task in self._producing:
            task.cancel()

    def try_again(self, task_ids: Sequence[str]) -> None:
        """Put back tasks whose groups are gone with the steps that trained on them."""
        for task_id in task_ids:
            self._tasks.put_back(self._tasks.task(task_id))

    def _kept_versions(self, number: int) -> IntArray:
        """Return the versions of the tokens that a group has from before a restart."""
        versions = self._partial.get(number, PartialGroup()).versions(self._buffer.gate.history.policy)
        return np.concatenate(versions) if versions else NO_VERSIONS

    def _start_group(self, background: asyncio.TaskGroup, ticket: Ticket, task: Task) -> None:
        producing = background.create_task(self._produce(ticket, task))
        self._producing.add(producing)
        producing.add_done_callback(self._producing.discard)

    async def _produce(self, ticket: Ticket, task: Task) -> None:
        """Bring one group from its task to the buffer. A failure drops the group, with a reason."""
        number = ticket.number
        ended: list[Episode] = []
        done = self._partial.pop(number, PartialGroup())
        scoring = GroupScoring(self._scorer, task, number=number, known=done.scores, log=self._buffer.log)
        try:
            async with scoring:
                group = await self._generate(number, task, scoring, ended, done)
                check_group(self._blobs, group)
                scored = ScoredGroup(group=group, scores=await scoring.scores(group))
            self._failures.good()
            selected = select(scored, self._selection)
            if selected.drop is not None:
                await self._drop_filtered(scored, selected.drop)
                return
            self._filtered_in_a_row = 0
            samples = tuple(selected.samples(index) for index in range(len(selected.scored.scores)))
            await self._buffer.finish(ticket, selected.scored, samples)
        except BlobLost as error:
            await self._fail(Group.of(number, task, ended), LOST_BLOB, str(error))
        except (RolloutFailed, ScoringFailed) as error:
            await self._fail(Group.of(number, task, ended), error.reason, str(error))

    async def _generate(
        self, number: int, task: Task, scoring: GroupScoring, ended: list[Episode], done: PartialGroup
    ) -> Group:
        """Generate the group. Episodes are added to `ended` as they end, whether or not the others succeed.
        `done` is what the group had done before a restart."""
        log = self._buffer.log

        def on_end(episode: Episode) -> None:
            # One that failed runs again after a restart.
            if episode.index not in done.episodes and episode.failure is None:
                log.append(EpisodeEnded(number=number, episode=episode))
            ended.append(episode)
            scoring.ended(episode)

        group = await self._runner.run_group(
            number, task, ended=on_end, done=done.episodes, calls=tuple(done.calls.values())
        )
        log.append(GroupGenerated(number=number))
        return group

    async def _drop_filtered(self, scored: ScoredGroup, reason: str) -> None:
        """Drop a group that selection rejects. Too many of them in a row end the run."""
        message = f"group {scored.group.number} has nothing to train on"
        await self._buffer.drop(scored.group, reason, message, scored.scores)
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= self._max_filtered:
            self._buffer.fail(
                UserError(
                    f"the last {self._filtered_in_a_row} groups were all dropped by selection (the last for "
                    f"{reason}, its scores around {scored.values.mean(dtype=float):g}), so there is nothing "
                    "to learn from: the tasks are too easy or too hard; change them, or algorithm.selection"
                )
            )

    async def _fail(self, group: Group, reason: str, message: str) -> None:
        await self._buffer.drop(group, reason, message)
        error = self._failures.failed(reason, message)
        if (word := self._failures.rate_words()) is not None:
            self._events.log(word)
        if error is not None:
            self._buffer.fail(error)
