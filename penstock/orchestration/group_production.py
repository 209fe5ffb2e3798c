"""The left half of the loop: from a task to a scored group in the buffer.

    feed ─ admit ─► produce: rollout ─ score ─► buffer

What goes wrong with a group costs that group, with a reason.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.blobs.verification import check_group
from penstock.buffer.admission import NO_VERSIONS, Dropped, ReadyGroup, Ticket
from penstock.buffer.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.errors import BlobLost, RolloutFailed, ScoringFailed
from penstock.interfaces import BlobStore, Scorer
from penstock.orchestration.activity import Activity, UnderWay
from penstock.orchestration.controller_events import ControllerEvents
from penstock.orchestration.failure_streak import FailureStreak
from penstock.orchestration.group_scoring import GroupScoring
from penstock.orchestration.intake import Intake
from penstock.orchestration.resume import Resume
from penstock.rollout.group_runner import RolloutRunner
from penstock.types import CallAnswer, Episode, Group, IntArray, PartialGroup, ScoredGroup, Task

LOST_BLOB = "lost_blob"
"""Why a group is dropped whose bulk data can't be written or read back."""


class TaskSource(Protocol):
    """What production needs of a stream of tasks (`penstock.tasks.stream.TaskStream` is one)."""

    def next(self) -> Task: ...

    def put_back(self, task: Task) -> None: ...

    @property
    def num_taken(self) -> int:
        """New tasks taken so far; one that was put back and taken again counts once."""


class GroupProduction:
    """Starts groups as the buffer admits them, and brings each to the buffer or to a counted drop."""

    def __init__(
        self,
        *,
        runner: RolloutRunner,
        scorer: Scorer,
        tasks: TaskSource,
        buffer: RolloutBuffer,
        intake: Intake,
        failures: FailureStreak,
        blobs: BlobStore,
        activity: Activity,
        events: ControllerEvents,
        resume: Resume | None = None,
    ) -> None:
        """`resume` has the groups that were under way before a restart."""
        self._runner = runner
        self._scorer = scorer
        self._tasks = tasks
        self._buffer = buffer
        self._intake = intake
        self._failures = failures
        self._blobs = blobs
        self._activity = activity
        self._events = events
        self._resumed = resume.groups if resume is not None else ()
        self._episodes = dict(resume.episodes) if resume is not None else {}
        """Of resumed groups, those that had ended, by group and index."""
        self._partial = dict(resume.partial) if resume is not None else {}
        """What else those groups had done."""
        self._admitted: dict[int, Task] = {
            group.ticket.number: group.scored.group.task for group in buffer.gate.state().ready
        } | {ticket.number: task for ticket, task in self._resumed}
        """The tasks of groups that are outstanding, and of some that no longer are."""
        self._producing: set[asyncio.Task[None]] = set()

    async def feed(self, background: asyncio.TaskGroup) -> None:
        """Start groups until the buffer closes: first those that were under way before a restart, then as many as
        may be admitted."""
        try:
            for held, task in self._resumed:
                ticket = await self._buffer.readmit(held, self._kept_versions(held.number))
                self._start_group(background, ticket, task)
            while True:
                start, reason = self._events.now(), self._buffer.waiting_for()[0]
                ticket = await self._buffer.admit()
                self._events.admission_blocked(start, reason)
                self._start_group(background, ticket, self._tasks.next())
        except BufferClosed:
            return

    def cancel(self) -> None:
        """Leave the groups under way."""
        for task in self._producing:
            task.cancel()

    def outstanding(self, numbers: set[int]) -> dict[int, Task]:
        """The tasks of the groups of these numbers, which are all that still count."""
        self._admitted = {number: task for number, task in self._admitted.items() if number in numbers}
        return dict(self._admitted)

    async def give_back(self, dropped: Dropped) -> None:
        """A group grew too old: its task is tried again."""
        scored = dropped.scored
        self._tasks.put_back(scored.group.task)
        message = f"group {dropped.ticket.number} crossed the staleness bound"
        self._events.dropped(scored.group, dropped.reason, message, scored.scores)

    def try_again(self, tasks: Sequence[Task]) -> None:
        """Their groups are gone with the steps that trained on them."""
        for task in tasks:
            self._tasks.put_back(task)

    def returned(self, groups: Sequence[ReadyGroup]) -> None:
        """Groups of undone steps wait for a step again."""
        self._admitted |= {group.ticket.number: group.scored.group.task for group in groups}

    def _kept_versions(self, number: int) -> IntArray:
        """Of tokens that a group has from before a restart."""
        ended = self._episodes.get(number, {}).values()
        policy = self._buffer.gate.history.policy
        versions = [turn.versions for episode in ended for turn in episode.turns if turn.policy == policy]
        versions += self._partial.get(number, PartialGroup()).versions()
        return np.concatenate(versions) if versions else NO_VERSIONS

    def _start_group(self, background: asyncio.TaskGroup, ticket: Ticket, task: Task) -> None:
        self._admitted[ticket.number] = task
        producing = background.create_task(self._produce(ticket, task, self._tasks.num_taken))
        self._producing.add(producing)
        producing.add_done_callback(self._producing.discard)

    async def _produce(self, ticket: Ticket, task: Task, num_taken: int) -> None:
        """One group, from its task to the buffer. What goes wrong costs the group, with a reason."""
        await self._buffer.start(ticket, task, num_taken)
        slot = self._events.begin_group()
        ended: list[Episode] = []
        partial = self._partial.pop(ticket.number, PartialGroup())
        scored_one = functools.partial(self._buffer.episode_scored, ticket)
        try:
            async with GroupScoring(self._scorer, task, known=partial.scores, scored=scored_one) as scoring:
                calls = tuple(partial.calls.values())
                group = await self._generate(slot, ticket, task, scoring, ended, calls)
                check_group(self._blobs, group)
                scored = await self._score(slot, group, scoring)
        except BlobLost as error:
            await self._drop(ticket, task, LOST_BLOB, str(error), ended)
        except (RolloutFailed, ScoringFailed) as error:
            await self._drop(ticket, task, error.reason, str(error), ended)
        else:
            await self._take_in(ticket, scored)
        finally:
            self._activity.under_way.pop(ticket.number, None)
            self._events.end_group(slot)

    async def _take_in(self, ticket: Ticket, scored: ScoredGroup) -> None:
        """Into the buffer, unless selection drops it or the log can't keep its blobs."""
        self._failures.good()
        group = scored.group
        try:
            reason = await self._intake.take(ticket, scored)
        except BlobLost as error:
            await self._drop(ticket, group.task, LOST_BLOB, str(error), group.episodes)
            return
        if reason is not None:
            message = f"group {ticket.number} has nothing to train on"
            self._events.dropped(group, reason, message, scored.scores)

    async def _generate(
        self,
        slot: int,
        ticket: Ticket,
        task: Task,
        scoring: GroupScoring,
        ended: list[Episode],
        calls: Sequence[CallAnswer],
    ) -> Group:
        """The group; its episodes are in `ended` as they end, whatever becomes of the others. `calls` are those
        that its episodes have made before."""
        done = self._episodes.pop(ticket.number, {})

        def on_end(episode: Episode) -> None:
            if episode.index not in done:
                self._buffer.ended(ticket, episode)
            ended.append(episode)
            scoring.ended(episode)

        start = self._events.now()
        self._activity.num_generating += 1
        self._activity.under_way[ticket.number] = UnderWay(stage="generation", since=start, task=task.id)
        try:
            return await self._runner.run_group(ticket.number, task, ended=on_end, done=done, calls=calls)
        finally:
            self._activity.num_generating -= 1
            self._activity.num_left += 1
            self._events.generated(slot, start, ticket.number)

    async def _score(self, slot: int, group: Group, scoring: GroupScoring) -> ScoredGroup:
        start = self._events.now()
        self._activity.num_scoring += 1
        self._activity.under_way[group.number] = UnderWay(stage="scoring", since=start, task=group.task.id)
        try:
            return ScoredGroup(group=group, scores=await scoring.scores(group))
        finally:
            self._activity.num_scoring -= 1
            self._activity.num_left += 1
            self._events.scored(slot, start, group.number)

    async def _drop(
        self, ticket: Ticket, task: Task, reason: str, message: str, ended: Sequence[Episode]
    ) -> None:
        await self._buffer.drop(ticket, reason)
        self._events.dropped(Group.of(ticket.number, task, ended), reason, message)
        error = self._failures.failed(reason, message)
        if (word := self._failures.rate_words()) is not None:
            self._events.recorder.log(word)
        if error is not None:
            self._buffer.fail(error)
