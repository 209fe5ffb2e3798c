"""The loop: generation on one side, training on the other, the buffer between them.

      feed ─ admit ─► produce: rollout ─ score ─► buffer ─► train: plan ─ step ─┐
                        ▲                                                       │ snapshot
                        └──── engines ◄──── sync (beside the next step) ◄───────┘

Everything it needs is passed in behind interfaces, and the only clock is the event loop's, so the same
code drives real processes and simulated ones.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.blobs.verification import check_group
from penstock.buffer.admission import Dropped, StepGroups, Ticket
from penstock.buffer.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.errors import BlobLost, RequestRefused, ScoringFailed
from penstock.interfaces import BlobStore, Engine, Scorer, Trainer
from penstock.orchestration.group_scoring import GroupScoring
from penstock.orchestration.intake import Intake
from penstock.orchestration.step_planner import StepPlanner, TrainedStep
from penstock.rollout.group_runner import RolloutRunner
from penstock.types import Interrupt, ScoredGroup, StepResult, Task, UpdateReceipt, WeightUpdate

LOST_BLOB = "lost_blob"
"""Why a group is dropped whose bulk data can't be written or read back."""


class TaskSource(Protocol):
    """What the controller needs of a stream of tasks (`penstock.tasks.stream.TaskStream` is one)."""

    def next(self) -> Task: ...

    def put_back(self, task: Task) -> None: ...


@dataclass(slots=True)
class Activity:
    """What the controller is waiting for right now, for the terminal view and the watchdog."""

    trainer: str = "starting"
    trainer_since: float = 0.0
    num_generating: int = 0
    num_scoring: int = 0
    syncing_version: int | None = None
    last_progress: float = 0.0


@dataclass(slots=True)
class Tally:
    """Sums over the run."""

    steps: int = 0
    samples: int = 0
    trainer_waiting_s: float = 0.0
    updates: list[UpdateReceipt] = field(default_factory=list)


class Controller:
    """Runs steps until the planned number is reached or `stop` is called."""

    def __init__(
        self,
        *,
        engine: Engine,
        trainers: Sequence[Trainer],
        scorer: Scorer,
        runner: RolloutRunner,
        tasks: TaskSource,
        buffer: RolloutBuffer,
        intake: Intake,
        planner: StepPlanner,
        steps: int,
        blobs: BlobStore,
        resumed: Sequence[tuple[Ticket, Task]] = (),
        interrupt: Interrupt = "inflight",
        on_step: Callable[[TrainedStep], None] = lambda step: None,
        on_update: Callable[[UpdateReceipt], None] = lambda receipt: None,
        on_drop: Callable[[str, str], None] = lambda reason, message: None,
    ) -> None:
        self._engine = engine
        self._trainers = trainers
        self._scorer = scorer
        self._runner = runner
        self._tasks = tasks
        self._intake = intake
        self._planner = planner
        self._steps = steps
        self._blobs = blobs
        self._resumed = resumed
        self._interrupt: Interrupt = interrupt
        self._on_step = on_step
        self._on_update = on_update
        self._on_drop = on_drop
        self._stopping = False
        self._producing: set[asyncio.Task[None]] = set()
        self.buffer = buffer
        self.activity = Activity()
        self.tally = Tally()
        self._sync_order = asyncio.Lock()
        self._stepped = asyncio.Event()

    def stop(self) -> None:
        """End after the step in progress."""
        self._stopping = True
        self.buffer.close()

    async def start(self) -> None:
        """Bring every engine to the trainer's starting weights, verified."""
        await self._sync(self._issue(self.buffer.gate.step))

    async def run(self) -> None:
        """The whole training. Returns when engines serve the last version."""
        async with asyncio.TaskGroup() as background:
            feeding = background.create_task(self._feed(background))
            with contextlib.suppress(BufferClosed):
                await self._train(background)
            self.buffer.close()
            feeding.cancel()
            for task in self._producing:
                task.cancel()

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
        self._tasks.put_back(dropped.scored.group.task)
        self._on_drop(dropped.reason, f"group {dropped.ticket.number} crossed the staleness bound")

    async def _feed(self, background: asyncio.TaskGroup) -> None:
        """Start groups: first those that were under way before a restart, then as many as may be admitted."""
        for ticket, task in self._resumed:
            self._start_group(background, ticket, task)
        while not self._stopping:
            try:
                ticket = await self.buffer.admit()
            except BufferClosed:
                return
            self._start_group(background, ticket, self._tasks.next())

    def _start_group(self, background: asyncio.TaskGroup, ticket: Ticket, task: Task) -> None:
        producing = background.create_task(self._produce(ticket, task))
        self._producing.add(producing)
        producing.add_done_callback(self._producing.discard)

    async def _produce(self, ticket: Ticket, task: Task) -> None:
        """One group, from its task to the buffer. What goes wrong costs the group, with a reason."""
        activity = self.activity
        await self.buffer.start(ticket, task)
        try:
            async with GroupScoring(self._scorer, task) as scoring:
                activity.num_generating += 1
                try:
                    group = await self._runner.run_group(ticket.number, task, ended=scoring.ended)
                    check_group(self._blobs, group)
                finally:
                    activity.num_generating -= 1
                activity.num_scoring += 1
                try:
                    scores = await scoring.scores(group)
                finally:
                    activity.num_scoring -= 1
        except RequestRefused as error:
            await self._drop(ticket, "refused", str(error))
        except BlobLost as error:
            await self._drop(ticket, LOST_BLOB, str(error))
        except ScoringFailed as error:
            await self._drop(ticket, error.reason, str(error))
        else:
            activity.last_progress = self._now()
            reason = await self._intake.take(ticket, ScoredGroup(group=group, scores=scores))
            if reason is not None:
                self._on_drop(reason, f"group {ticket.number} has nothing to train on")

    async def _drop(self, ticket: Ticket, reason: str, message: str) -> None:
        await self.buffer.drop(ticket, reason)
        self._on_drop(reason, message)

    async def _train(self, background: asyncio.TaskGroup) -> None:
        for number in range(self.buffer.gate.step + 1, self._steps + 1):
            if self._stopping:
                return
            self._set_trainer("waiting for groups")
            waiting_since = self._now()
            taken = await self.buffer.take_step(self._give_back)
            waited_s = self._now() - waiting_since
            self._set_trainer(f"step {number}")
            version = await self._step(number, taken, waited_s)
            background.create_task(self._sync(version))
        self._set_trainer("done")

    def _issue(self, step: int) -> int:
        """A number for the weights that `step` makes."""
        return self.buffer.gate.history.issue(step)

    async def _step(self, number: int, taken: StepGroups, waited_s: float) -> int:
        """Train on the groups; returns the version under which the result may be published."""
        version = self._issue(number)
        start = self._now()
        while True:
            try:
                results = await self._run_plans(taken, version)
                break
            except BlobLost as error:  # the trainer reads all blobs of a step before it trains on any
                taken = await self._without_lost(taken, error)
        await self.buffer.trained(taken)
        self.tally.steps += 1
        self.tally.samples += sum(len(group.scored.scores) for group in taken.groups)
        self.tally.trainer_waiting_s += waited_s
        self.activity.last_progress = self._now()
        self._stepped.set()
        self._stepped = asyncio.Event()
        self._on_step(
            TrainedStep(
                number=number,
                taken=taken,
                results=results,
                waited_s=waited_s,
                took_s=self._now() - start,
                time_s=self._now(),
            )
        )
        return version

    async def _run_plans(self, taken: StepGroups, version: int) -> list[StepResult]:
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
                lost[group.ticket.number] = str(reason)
        if not 0 < len(lost) < len(taken.groups):
            raise error
        for number, message in lost.items():
            taken = await self.buffer.drop_taken(taken, number, LOST_BLOB)
            self._on_drop(LOST_BLOB, message)
        return taken

    async def _sync(self, version: int) -> None:
        """Publish one version and bring every engine to it, in order, beside the next step."""
        async with self._sync_order:
            self.activity.syncing_version = version
            update = await self._trainers[0].publish(version)
            receipt = await self._deliver(update)
            self.tally.updates.append(receipt)
            self._on_update(receipt)
            self.buffer.served(version)
            await self._trainers[0].release(version)
            self.activity.syncing_version = None

    async def _deliver(self, update: WeightUpdate) -> UpdateReceipt:
        """Bring every engine to an update. Where it is sent, trainer and engines act together."""
        if not update.sends:
            return await self._engine.update(update, self._interrupt)
        async with asyncio.TaskGroup() as both:
            taking = both.create_task(self._engine.update(update, self._interrupt))
            both.create_task(self._trainers[0].send(update.version))
        return taking.result()

    def _set_trainer(self, what: str) -> None:
        self.activity.trainer = what
        self.activity.trainer_since = self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
