"""Step planning: which rank trains what, with step-wide denominators, as data."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.buffer.admission import StepGroups
from penstock.buffer.history import VersionHistory
from penstock.trainer.packing import plan_step
from penstock.types import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A finished step: what went in, what each rank reported, and how long the trainer waited for it."""

    number: int
    taken: StepGroups
    results: Sequence[StepResult]
    waited_s: float
    took_s: float
    time_s: float


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Packs the groups of a step into one plan per rank."""

    ranks: int
    micro_batch_tokens: int
    shared_prompts: bool = True

    def plan(self, taken: StepGroups, history: VersionHistory, publishes: int | None) -> tuple[StepPlan, ...]:
        return plan_step(
            taken.step + 1,
            [group.scored for group in taken.groups],
            ranks=self.ranks,
            micro_batch_tokens=self.micro_batch_tokens,
            shared_prompts=self.shared_prompts,
            samples=[group.samples for group in taken.groups],
            policy=history.policy,
            publishes=publishes,
            step_of=history.step_of,
        )
