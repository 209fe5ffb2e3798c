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

import msgspec

from penstock.buffer.admission import Dropped, Selection, Ticket
from penstock.buffer.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.errors import RequestRefused, ScoringFailed
from penstock.interfaces import Engine, Scorer, Trainer
from penstock.orchestration.step_planner import StepPlanner, TrainedStep
from penstock.rollout.group_runner import RolloutRunner
from penstock.types import ScoredGroup, Task, UpdateReceipt


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
        planner: StepPlanner,
        steps: int,
        recompute_kv: bool = False,
        on_step: Callable[[TrainedStep], None] = lambda step: None,
        on_update: Callable[[UpdateReceipt], None] = lambda receipt: None,
        on_drop: Callable[[str, str], None] = lambda reason, message: None,
    ) -> None:
        self._engine = engine
        self._trainers = trainers
        self._scorer = scorer
        self._runner = runner
        self._tasks = tasks
        self._planner = planner
        self._steps = steps
        self._recompute_kv = recompute_kv
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
        await self._sync(0)

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

    async def reached(self, step: int) -> None:
        """Wait until this many steps are done."""
        while self.tally.steps < step:
            await self._stepped.wait()

    def give_back(self, dropped: Dropped) -> None:
        """A group grew too old: its task is tried again."""
        self._tasks.put_back(dropped.scored.group.task)
        self._on_drop(dropped.reason, f"group {dropped.scored.group.number} crossed the staleness bound")

    async def _feed(self, background: asyncio.TaskGroup) -> None:
        while not self._stopping:
            try:
                ticket = await self.buffer.admit()
            except BufferClosed:
                return
            task = background.create_task(self._produce(ticket, self._tasks.next()))
            self._producing.add(task)
            task.add_done_callback(self._producing.discard)

    async def _produce(self, ticket: Ticket, task: Task) -> None:
        """One group, from its task to the buffer. What goes wrong costs the group, with a reason."""
        activity = self.activity
        try:
            activity.num_generating += 1
            try:
                group = await self._runner.run_group(ticket.number, task)
            finally:
                activity.num_generating -= 1
            activity.num_scoring += 1
            try:
                scores = await self._scorer.score(group)
            finally:
                activity.num_scoring -= 1
        except RequestRefused as error:
            self._drop(ticket, "refused", str(error))
        except ScoringFailed as error:
            self._drop(ticket, error.reason, str(error))
        else:
            activity.last_progress = self._now()
            self.buffer.finish(ticket, ScoredGroup(group=group, scores=scores))

    def _drop(self, ticket: Ticket, reason: str, message: str) -> None:
        self.buffer.drop(ticket, reason)
        self._on_drop(reason, message)

    async def _train(self, background: asyncio.TaskGroup) -> None:
        for number in range(1, self._steps + 1):
            if self._stopping:
                return
            self._set_trainer("waiting for groups")
            waiting_since = self._now()
            selection = await self.buffer.take_step()
            waited_s = self._now() - waiting_since
            self._set_trainer(f"step {number}")
            await self._step(number, selection, waited_s)
            background.create_task(self._sync(selection.version + 1))
        self._set_trainer("done")

    async def _step(self, number: int, selection: Selection, waited_s: float) -> None:
        plans = self._planner.plan(number, selection)
        start = self._now()
        results = await asyncio.gather(
            *(trainer.step(plan) for trainer, plan in zip(self._trainers, plans, strict=True))
        )
        self.buffer.trained(selection)
        self.tally.steps += 1
        self.tally.samples += sum(len(group.scored.scores) for group in selection.groups)
        self.tally.trainer_waiting_s += waited_s
        self.activity.last_progress = self._now()
        self._stepped.set()
        self._stepped = asyncio.Event()
        self._on_step(
            TrainedStep(
                number=number,
                selection=selection,
                results=results,
                waited_s=waited_s,
                took_s=self._now() - start,
                time_s=self._now(),
            )
        )

    async def _sync(self, version: int) -> None:
        """Publish one version and bring every engine to it, in order, beside the next step."""
        async with self._sync_order:
            self.activity.syncing_version = version
            update = await self._trainers[0].publish(version)
            if self._recompute_kv:
                update = msgspec.structs.replace(update, recompute_kv=True)
            receipt = await self._engine.update(update)
            self.tally.updates.append(receipt)
            self._on_update(receipt)
            self.buffer.served(version)
            await self._trainers[0].release(version)
            self.activity.syncing_version = None

    def _set_trainer(self, what: str) -> None:
        self.activity.trainer = what
        self.activity.trainer_since = self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
