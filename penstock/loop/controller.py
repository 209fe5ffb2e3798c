"""Runs the loop: generation on one side, training on the other, the buffer between them.

      feed ─ admit ─► produce: rollout ─ score ─► buffer ─► train: plan ─ step ─┐
                        ▲                                                       │ snapshot
                        └── engines ◄── weight sync (beside the next step) ◄────┘

`group_production.py` is the left half, `step_runner.py` runs one step on every rank; this module joins them.
Everything it needs is passed in behind interfaces, and its only clock is the event loop's, so the same code
drives real processes and simulated ones.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from penstock.errors import TrainerLost
from penstock.loop.activity import Activity
from penstock.loop.adaptive import ClosedLoop
from penstock.loop.admission import ReadyGroup, StepGroups
from penstock.loop.attempt_records import GroupDropped, RunResumed
from penstock.loop.edges import Checkpoints, LoopEvents
from penstock.loop.group_production import GroupProduction
from penstock.loop.resume import Resume, TrainedGroups
from penstock.loop.rollout_buffer import BufferClosed, RolloutBuffer
from penstock.loop.step_planner import TrainedStep
from penstock.loop.step_runner import StepRunner
from penstock.loop.weight_sync import Offer, WeightSync
from penstock.records.interfaces import Engine, Trainer

UNDONE = "undone"
"""Drop reason of a group whose step was undone, where no journal has kept it."""


class Controller:
    """Runs steps until the planned number is reached or `stop` is called."""

    def __init__(
        self,
        *,
        production: GroupProduction,
        buffer: RolloutBuffer,
        runner: StepRunner,
        sync: WeightSync,
        trainer: Trainer,
        steps: int,
        activity: Activity,
        events: LoopEvents,
        closed_loop: ClosedLoop,
        starting_updates: int = 1,
        publish_every: int = 1,
        checkpoints: Checkpoints | None = None,
        trained_groups: TrainedGroups | None = None,
    ) -> None:
        """`starting_updates` is how many updates bring an engine to the starting weights: two for an adapter,
        which comes after the weights below it. `trained_groups` gives the groups of undone steps back; with
        None only their tasks are known."""
        self.sync = sync
        self.buffer = buffer
        self.activity = activity
        self._production = production
        self._runner = runner
        self._trainer = trainer
        self._steps = steps
        self._starting_updates = starting_updates
        self._publish_every = publish_every
        self._events = events
        self._closed_loop = closed_loop
        self._checkpoints = checkpoints
        self._trained_groups = trained_groups
        self._stopping = False
        self.is_training = True
        """Until the last weights are offered. A trainer lost after that is not restarted."""
        self._is_published = True
        """Whether the weights of the last step have a version."""
        self._stepped = asyncio.Event()
        self._started = asyncio.Event()
        self._trainer_there = asyncio.Event()
        self._trainer_there.set()
        self._incarnation = 0
        """Counts rollbacks."""
        self._first_version = 0
        """Of the weights that the trainer started with."""
        self._stepping = asyncio.Lock()
        """Held during a step and a snapshot, so a snapshot has the weights of the step that the gate counts."""

    def stop(self) -> None:
        """Stop after the step in progress."""
        self._stopping = True
        self.buffer.close()

    async def start(self) -> None:
        """Bring every engine to the trainer's starting weights and verify them."""
        try:
            await self._deliver_start()
        except TrainerLost:  # `roll_back` delivers the weights then
            self.trainer_lost()
            await self._trainer_there.wait()
        self._started.set()

    async def _deliver_start(self) -> None:
        self._first_version = self.buffer.gate.history.newest + 1
        for _ in range(self._starting_updates):
            version = self.sync.issue(self.buffer.gate.step)
            await self.sync.deliver(Offer(version=version, made_s=self._now()))

    @property
    def is_ready(self) -> bool:
        """Return whether the trainer's weights can be published."""
        return self._started.is_set() and self._trainer_there.is_set()

    async def republish(self) -> None:
        """Publish the present weights under a new version, because an engine without weights has joined. If the
        trainer is lost meanwhile, its restart publishes them."""
        await self._started.wait()
        with contextlib.suppress(TrainerLost):
            async with self._stepping:
                if not self._trainer_there.is_set():
                    return
                version = self.sync.issue(self.buffer.gate.step)
                await self._trainer.snapshot(version)
                self._is_published = True
            await self.sync.serve(Offer(version=version, made_s=self._now()))

    async def bring_below_adapter(self, engine: Engine) -> None:
        """Send the weights below the adapter to an engine that joins a run which trains an adapter."""
        await self._started.wait()
        await self._trainer_there.wait()
        if self._starting_updates > 1:
            async with self._stepping:
                await self.sync.send_again(self._first_version, engine)

    def shrink_steps(self) -> str | None:
        """Make micro-batches smaller from now on, because the trainer ran out of memory. Returns a sentence
        about it."""
        return self._runner.shrink()

    def trainer_lost(self) -> None:
        """Begin no step before `roll_back`. Generation continues."""
        self._trainer_there.clear()

    async def pause(self) -> int:
        """Wait for the step under way to end, pause weight sync, and return the first version of the next
        trainer."""
        async with self._stepping:
            self.activity.trainer = "gone, another one is starting"
            await self.sync.pause()
            return self.buffer.gate.history.newest + 1

    async def roll_back(self, step: int, consumed: tuple[tuple[int, int], ...]) -> None:
        """Continue with another trainer, which has started from the checkpoint of `step` and has trained on the
        groups `consumed`. Steps after it are undone: their groups are trained again, or their tasks are tried
        again."""
        async with self._stepping:
            undone = self.buffer.gate.step - step
            returned = await self._return_groups(step)
            self.buffer.roll_back(step, consumed=consumed, returned=returned)
            self._incarnation += 1
            self._is_published = True
            if self._checkpoints is not None:
                self._checkpoints.rolled_back(step)
            self.sync.resume()
        self._events.log(
            f"the trainer resumes from step {step}: {undone} steps are undone, {len(returned)} of their groups are "
            "trained again"
        )
        await self._deliver_start()
        self._trainer_there.set()

    async def _return_groups(self, step: int) -> Sequence[ReadyGroup]:
        """Recover the groups that the steps after `step` had trained. Without a journal only their tasks are
        known, which are tried again."""
        log = self.buffer.log
        if self._trained_groups is None:
            gone = log.attempts.trained_after(step)
            await log.append(RunResumed(step=step))
            for one in gone:
                await log.append(GroupDropped(number=one.ticket.number, reason=UNDONE, returns=one.task_id))
            self._production.try_again([one.task_id for one in gone])
            return ()
        back = await self._trained_groups.after(step)
        for lost in back.lost:
            await self.buffer.drop(lost.group, lost.reason, lost.message, lost.scores)
        return back.ready

    async def run(self) -> None:
        """Run the whole training. Returns when engines serve the last version."""
        async with asyncio.TaskGroup() as background:
            feeding = background.create_task(self._production.feed(background))
            background.create_task(self.sync.run())
            with contextlib.suppress(BufferClosed):
                await self._train(background)
            self.buffer.close()
            feeding.cancel()
            self._production.cancel()
            with contextlib.suppress(TrainerLost):
                await self._publish_last()
            self.sync.finish()
            self.is_training = False

    def resume_point(self) -> Resume:
        """Return all that another controller needs to continue from here, between two steps."""
        gate = self.buffer.gate.state()
        tickets = [*gate.running, *(group.ticket for group in gate.ready)]
        attempts = self.buffer.log.attempts.by_number
        task_ids = {ticket.number: attempts[ticket.number].task_id for ticket in tickets}
        return Resume(gate=gate, history=self.buffer.gate.history.state(), task_ids=task_ids)

    @property
    def steps_done(self) -> int:
        """Return how many steps the surviving history has, those of earlier sessions included."""
        return self.buffer.gate.step

    async def reached(self, step: int) -> None:
        """Wait until this many steps are done."""
        while self.steps_done < step:
            await self._stepped.wait()

    async def _train(self, background: asyncio.TaskGroup) -> None:
        while self.buffer.gate.step < self._steps and not self._stopping:
            await self._trainer_there.wait()
            self.activity.trainer = "waiting for groups"
            incarnation, waiting_since = self._incarnation, self._now()
            taken = await self.buffer.take_step()
            waited_s, number = self._now() - waiting_since, taken.step + 1
            waits = self._events.waited(waiting_since, taken)
            async with self._stepping:
                if not self._trainer_there.is_set() or incarnation != self._incarnation:
                    self.buffer.put_back(taken)  # a trainer was lost: another step than this comes next
                    continue
                try:
                    await self._step(background, number, taken, waited_s, waits)
                except TrainerLost:  # `roll_back` makes the groups ready again
                    self.trainer_lost()
        self.activity.trainer = "done"

    async def _step(
        self,
        background: asyncio.TaskGroup,
        number: int,
        taken: StepGroups,
        waited_s: float,
        waits: dict[str, float],
    ) -> None:
        """Train on the groups, and offer the weights if it is their turn. The checkpoint comes before the offer:
        a synchronous run admits nothing before its engines have the new weights, so no group is under way in
        its checkpoints."""
        self.activity.trainer = f"step {number}"
        publishes = number % self._publish_every == 0 or number == self._steps
        version = self.sync.issue(number) if publishes else None
        start = self._now()
        taken, results = await self._runner.run(taken, version)
        if not taken.groups:  # all of them were lost: the next ones make this step
            if version is not None:
                self.sync.withdraw(version)
            return
        self._is_published = publishes
        self.activity.trainer = f"step {number}: its groups reach the disk"
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
            waits=waits,
        )
        bound = self._closed_loop.observe(ess=step.metrics().get("ess", 1.0), idle=step.idle_share)
        self._events.trained(step, bound)
        if self._checkpoints is not None and self._checkpoints.is_due(number):
            self.activity.trainer = f"checkpoint of step {number}"
            await self._checkpoints.begin(self.resume_point())
            background.create_task(self._checkpoints.settle())
        if version is not None:
            snapshot_s = max(result.seconds.get("snapshot", 0.0) for result in results)
            await self.sync.offer(Offer(version=version, made_s=step.time_s, snapshot_s=snapshot_s))

    async def _publish_last(self) -> None:
        """Serve the last weights of a run that was stopped between two publications."""
        if not self._is_published:
            version = self.sync.issue(self.buffer.gate.step)
            await self._trainer.snapshot(version)
            await self.sync.offer(Offer(version=version, made_s=self._now()))

    def _now(self) -> float:
        return self._events.now()
