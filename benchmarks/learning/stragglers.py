"""Lateness under stragglers: the library's own gate decides, on a clock of ticks.

A tick is the time of one training step. Most groups are generated within one; an attempt at a problem that
carries in its last digit takes `STRAGGLE_TICKS` in half of all cases, as hard problems do, and its tokens
are sampled by the weights served meanwhile. So lateness is not independent of the task: what a policy does
with late groups decides how well hard problems are learned. In each tick the trainer takes a step, or
waits.
"""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from benchmarks.learning.arms import Arm, Curve, Setup
from benchmarks.learning.bed import MICRO_BATCH_TOKENS, TestBed, scored
from penstock.loop.admission import STALE, StalenessGate, StepGroups, Ticket
from penstock.records import Task
from penstock.trainer.step.packing import plan_step

STRAGGLE_TICKS = 8
STRAGGLE_SHARE = 0.5
"""Of the attempts at problems that carry."""
SPEED = 1.5
"""Groups that the engines can start in a tick, over those that the trainer takes."""
MAX_TICKS_PER_STEP = 6
"""A schedule that needs more is stuck: an error of the experiment, not a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A group being generated: the version served at each tick of its life, by its first tick."""

    ticket: Ticket
    task: Task
    started: int
    ticks: int


def run_stragglers(arm: Arm, seed: int, setup: Setup) -> Curve:
    """One run under `arm.late`, with `arm.lag` as the bound."""
    assert arm.late is not None
    gate = StalenessGate(groups_per_step=setup.groups, max_staleness=arm.lag, late=arm.late)
    gate.history.issue(0)
    bed = TestBed(arm, seed, setup, keep=STRAGGLE_TICKS + 2)
    return StragglingSchedule(gate, bed, setup, seed).run()


class StragglingSchedule:
    """Engines on one side, the trainer on the other, one tick at a time."""

    def __init__(self, gate: StalenessGate, bed: TestBed, setup: Setup, seed: int) -> None:
        self._gate, self._bed, self._setup = gate, bed, setup
        self._random = random.Random(f"stragglers/{seed}")
        self._running: list[InFlight] = []
        self._served: list[int] = []
        """The version served at each tick."""

    def run(self) -> Curve:
        setup, gate, bed = self._setup, self._gate, self._bed
        drops: Counter[str] = Counter()
        tick = 0
        while bed.version < setup.steps:
            self._served.append(bed.version)
            self._start(tick)
            self._finish(tick)
            taken, dropped = gate.select()
            for one in dropped:
                drops[STALE] += 1
                bed.stream.put_back(one.scored.group.task)
            tick += 1
            if taken is not None:
                self._train(taken, tick)
            if tick > MAX_TICKS_PER_STEP * setup.steps:
                raise RuntimeError(f"{tick} ticks for {bed.version} steps: the schedule is stuck")
        return bed.curve(dict(drops))

    def _start(self, tick: int) -> None:
        for _ in range(int(SPEED * self._setup.groups)):
            if not self._gate.may_admit():
                return
            task = self._bed.stream.next()
            late = carries(task) and self._random.random() < STRAGGLE_SHARE
            ticks = STRAGGLE_TICKS if late else 1
            self._running.append(InFlight(ticket=self._gate.admit(), task=task, started=tick, ticks=ticks))

    def _finish(self, tick: int) -> None:
        """Sample the groups whose last token falls into this tick, in one batch for each schedule."""
        due = [one for one in self._running if tick - one.started >= one.ticks - 1]
        self._running = [one for one in self._running if one not in due]
        for ticks in sorted({one.ticks for one in due}):
            batch = [one for one in due if one.ticks == ticks]
            groups = self._bed.sampler.sample(
                [(one.ticket.number, one.task) for one in batch], self._versions(batch[0])
            )
            for one, group in zip(batch, scored(groups), strict=True):
                self._gate.finish(one.ticket, group)

    def _versions(self, one: InFlight) -> list[int]:
        """The version that samples each token, when tokens are spread evenly over the group's life. All of
        a batch have it in common: they started and end together."""
        places = np.linspace(0, one.ticks - 1, self._bed.max_tokens).round().astype(int)
        return [self._served[one.started + place] for place in places]

    def _train(self, taken: StepGroups, tick: int) -> None:
        gate = self._gate
        plan = plan_step(
            taken.step + 1,
            [group.scored for group in taken.groups],
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            samples=[group.samples for group in taken.groups],
            age_of=[group.age_of for group in taken.groups],
            fresh=gate.history.versions_of(taken.step),
        )[0]
        self._bed.train(plan, tick)
        gate.trained(taken)
        gate.history.issue(gate.step)
        gate.served_step = gate.step


def carries(task: Task) -> bool:
    """Whether the last digits of a problem such as `214+387=` sum to ten or more."""
    assert isinstance(task.prompt, str)
    left, right = task.prompt.rstrip("=").split("+")
    return int(left[-1]) + int(right[-1]) >= 10
