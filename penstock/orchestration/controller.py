"""The loop: generation on one side, training on the other, the buffer between them.

      feed ─ admit ─► produce: rollout ─ score ─► buffer ─► train: plan ─ step ─┐
                        ▲                                                       │ snapshot
                        └── engines ◄── weight sync (beside the next step) ◄────┘

Everything it needs is passed in behind interfaces, and the only clock is the event loop's, so the same
code drives real processes and simulated ones.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.blobs.verification import check_group
from penstock.buffer.admission import Dropped, StepGroups, Ticket
from penstock.buffer.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.errors import BlobLost, RolloutFailed, ScoringFailed
from penstock.interfaces import BlobStore, Scorer, Trainer
from penstock.orchestration.activity import Activity
from penstock.orchestration.checkpoints import Checkpoints
from penstock.orchestration.controller_events import ControllerEvents
from penstock.orchestration.failure_streak import FailureStreak
from penstock.orchestration.group_scoring import GroupScoring
from penstock.orchestration.intake import Intake
from penstock.orchestration.resume import Resume
from penstock.orchestration.step_planner import StepPlanner, TrainedStep
from penstock.orchestration.weight_sync import Offer, WeightSync
from penstock.rollout.group_runner import RolloutRunner
from penstock.types import (
    Episode,
    Group,
    ScoredGroup,
    StepResult,
    Task,
    group_scope,
)

LOST_BLOB = "lost_blob"
"""Why a group is dropped whose bulk data can't be written or read back."""


class TaskSource(Protocol):
    """What the controller needs of a stream of tasks (`penstock.tasks.stream.TaskStream` is one)."""

    def next(self) -> Task: ...

    def put_back(self, task: Task) -> None: ...

    @property
    def num_taken(self) -> int:
        """New tasks taken so far; one that was put back and taken again counts once."""


class Controller:
    """Runs steps until the planned number is reached or `stop` is called."""

    def __init__(
        self,
        *,
        sync: WeightSync,
        trainers: Sequence[Trainer],
        scorer: Scorer,
        runner: RolloutRunner,
        tasks: TaskSource,
        buffer: RolloutBuffer,
        intake: Intake,
        failures: FailureStreak,
        planner: StepPlanner,
        steps: int,
        blobs: BlobStore,
        starting_updates: int = 1,
        resumed: Sequence[tuple[Ticket, Task]] = (),
        episodes: Mapping[int, Mapping[int, Episode]] | None = None,
        publish_every: int = 1,
        activity: Activity,
        events: ControllerEvents,
        after_step: Callable[[TrainedStep], int],
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`starting_updates` is how many updates bring an engine to the weights of the start: an adapter comes
        after the weights below it. `episodes` are those of resumed groups that had ended, by group and index."""
        self.sync = sync
        self._trainers = trainers
        self._scorer = scorer
        self._runner = runner
        self._tasks = tasks
        self._intake = intake
        self._failures = failures
        self._planner = planner
        self._steps = steps
        self._blobs = blobs
        self._starting_updates = starting_updates
        self._resumed = resumed
        self._publish_every = publish_every
        self._events = events
        self._after_step = after_step
        self._checkpoints = checkpoints
        self._episodes = dict(episodes or {})
        self._admitted: dict[int, Task] = {
            group.ticket.number: group.scored.group.task for group in buffer.gate.state().ready
        } | {ticket.number: task for ticket, task in resumed}
        """The tasks of groups that are outstanding, and of some that no longer are."""
        self._stopping = False
        self._producing: set[asyncio.Task[None]] = set()
        self.buffer = buffer
        self.activity = activity
        self._is_published = True
        """Whether the weights of the last step have a version."""
        self._stepped = asyncio.Event()

    def stop(self) -> None:
        """End after the step in progress."""
        self._stopping = True
        self.buffer.close()

    async def start(self) -> None:
        """Bring every engine to the trainer's starting weights, verified."""
        for _ in range(self._starting_updates):
            version = self.sync.issue(self.buffer.gate.step)
            await self.sync.deliver(Offer(version=version, made_s=self._now()))

    async def run(self) -> None:
        """The whole training. Returns when engines serve the last version."""
        async with asyncio.TaskGroup() as background:
            feeding = background.create_task(self._feed(background))
            background.create_task(self.sync.run())
            with contextlib.suppress(BufferClosed):
                await self._train()
            self.buffer.close()
            feeding.cancel()
            for task in self._producing:
                task.cancel()
            await self._publish_last()
            self.sync.finish()

    def stand(self) -> Resume:
        """Where it stands now, between two steps."""
        gate = self.buffer.gate.state()
        outstanding = {ticket.number for ticket in gate.running} | {one.ticket.number for one in gate.ready}
        self._admitted = {number: task for number, task in self._admitted.items() if number in outstanding}
        return Resume(gate=gate, history=self.buffer.gate.history.state(), running=dict(self._admitted))

    @property
    def steps_done(self) -> int:
        """Of the surviving history, those of an earlier session included."""
        return self.buffer.gate.step

    async def reached(self, step: int) -> None:
        """Wait until this many steps are done."""
        while self.steps_done < step:
            await self._stepped.wait()

    async def _give_back(self, dropped: Dropped) -> None:
        """A group grew too old: its task is tried again."""
        scored = dropped.scored
        self._tasks.put_back(scored.group.task)
        message = f"group {dropped.ticket.number} crossed the staleness bound"
        self._events.dropped(scored.group, dropped.reason, message, scored.scores)

    async def _feed(self, background: asyncio.TaskGroup) -> None:
        """Start groups: first those that were under way before a restart, then as many as may be admitted."""
        for held, task in self._resumed:
            try:
                ticket = await self.buffer.readmit(held)
            except BufferClosed:
                return
            self._start_group(background, ticket, task)
        while not self._stopping:
            start, reason = self._now(), self.buffer.waiting_for()[0]
            try:
                ticket = await self.buffer.admit()
            except BufferClosed:
                return
            self._events.admission_blocked(start, reason)
            self._start_group(background, ticket, self._tasks.next())

    def _start_group(self, background: asyncio.TaskGroup, ticket: Ticket, task: Task) -> None:
        self._admitted[ticket.number] = task
        producing = background.create_task(self._produce(ticket, task, self._tasks.num_taken))
        self._producing.add(producing)
        producing.add_done_callback(self._producing.discard)

    async def _produce(self, ticket: Ticket, task: Task, num_taken: int) -> None:
        """One group, from its task to the buffer. What goes wrong costs the group, with a reason."""
        await self.buffer.start(ticket, task, num_taken)
        slot = self._events.begin_group()
        ended: list[Episode] = []
        try:
            async with GroupScoring(self._scorer, task) as scoring:
                group = await self._generate(slot, ticket, task, scoring, ended)
                check_group(self._blobs, group)
                scored = await self._score(slot, group, scoring)
        except BlobLost as error:
            await self._drop(ticket, task, LOST_BLOB, str(error), ended)
        except (RolloutFailed, ScoringFailed) as error:
            await self._drop(ticket, task, error.reason, str(error), ended)
        else:
            await self._take_in(ticket, scored)
        finally:
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
        self, slot: int, ticket: Ticket, task: Task, scoring: GroupScoring, ended: list[Episode]
    ) -> Group:
        """The group; its episodes are in `ended` as they end, whatever becomes of the others."""

        done = self._episodes.pop(ticket.number, {})

        def on_end(episode: Episode) -> None:
            if episode.index not in done:
                self.buffer.ended(ticket, episode)
            ended.append(episode)
            scoring.ended(episode)

        start = self._now()
        self.activity.num_generating += 1
        try:
            return await self._runner.run_group(ticket.number, task, ended=on_end, done=done)
        finally:
            self.activity.num_generating -= 1
            self._events.group_span(slot, "generate", start, ticket.number)

    async def _score(self, slot: int, group: Group, scoring: GroupScoring) -> ScoredGroup:
        start = self._now()
        self.activity.num_scoring += 1
        try:
            return ScoredGroup(group=group, scores=await scoring.scores(group))
        finally:
            self.activity.num_scoring -= 1
            self._events.group_span(slot, "score", start, group.number)

    async def _drop(
        self, ticket: Ticket, task: Task, reason: str, message: str, ended: Sequence[Episode]
    ) -> None:
        await self.buffer.drop(ticket, reason)
        self._events.dropped(Group.of(ticket.number, task, ended), reason, message)
        error = self._failures.failed(reason, message)
        if error is not None:
            self.buffer.fail(error)

    async def _train(self) -> None:
        for number in range(self.buffer.gate.step + 1, self._steps + 1):
            if self._stopping:
                return
            self.activity.trainer = "waiting for groups"
            waiting_since = self._now()
            taken = await self.buffer.take_step(self._give_back)
            waited_s = self._now() - waiting_since
            self._events.recorder.span("train", "wait for groups", waiting_since, step=number)
            self.activity.trainer = f"step {number}"
            await self._step(number, taken, waited_s)
            if self._checkpoints is not None and self._checkpoints.is_due(number):
                self.activity.trainer = f"checkpoint of step {number}"
                await self._checkpoints.write(self.stand())
        self.activity.trainer = "done"

    async def _publish_last(self) -> None:
        """A run that was stopped between two publications ends with its last weights served too."""
        if not self._is_published:
            version = self.sync.issue(self.buffer.gate.step)
            await self._trainers[0].snapshot(version)
            await self.sync.offer(Offer(version=version, made_s=self._now()))

    async def _step(self, number: int, taken: StepGroups, waited_s: float) -> None:
        """Train on the groups, and offer the result to the engines if it is its turn."""
        self._is_published = number % self._publish_every == 0 or number == self._steps
        version = self.sync.issue(number) if self._is_published else None
        start = self._now()
        while True:
            try:
                results = await self._run_plans(taken, version)
                break
            except BlobLost as error:  # the trainer reads all blobs of a step before it trains on any
                taken = await self._without_lost(taken, error)
        await self.buffer.trained(taken)
        self._stepped.set()
        self._stepped = asyncio.Event()
        step = TrainedStep(
            number=number,
            taken=taken,
            results=results,
            waited_s=waited_s,
            took_s=self._now() - start,
            time_s=self._now(),
        )
        self._events.trained(step, self._after_step(step))
        if version is not None:
            snapshot_s = max(result.seconds.get("snapshot", 0.0) for result in results)
            await self.sync.offer(Offer(version=version, made_s=step.time_s, snapshot_s=snapshot_s))

    async def _run_plans(self, taken: StepGroups, version: int | None) -> list[StepResult]:
        with self._events.recorder.measure("train", "plan", step=taken.step + 1):
            plans = self._planner.plan(taken, self.buffer.gate.history, version)
        return await asyncio.gather(
            *(trainer.step(plan) for trainer, plan in zip(self._trainers, plans, strict=True))
        )

    async def _without_lost(self, taken: StepGroups, error: BlobLost) -> StepGroups:
        """The step without the groups whose blobs can't be read. When none is left, or all can, it is no matter of
        single groups."""
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
        if not 0 < len(lost) < len(taken.groups):
            raise error
        for number, (scored, message) in lost.items():
            taken = await self.buffer.drop_taken(taken, number, LOST_BLOB)
            self._events.dropped(scored.group, LOST_BLOB, message, scored.scores)
        return taken

    def _now(self) -> float:
        return self._events.now()
