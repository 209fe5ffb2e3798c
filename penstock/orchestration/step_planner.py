"""Step planning: which rank trains what, with step-wide denominators, as data."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.buffer.admission import StepGroups
from penstock.buffer.history import VersionHistory
from penstock.trainer.packing import plan_step
from penstock.types import StepPlan, StepResult, merge_metrics, metric_values


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A finished step: what went in, what each rank reported, and how long the trainer waited for it."""

    number: int
    taken: StepGroups
    results: Sequence[StepResult]
    waited_s: float
    took_s: float
    time_s: float

    def metrics(self) -> dict[str, float]:
        """Of the whole step: those of all ranks, merged."""
        return metric_values(merge_metrics([result.metrics for result in self.results]))

    def seconds(self) -> dict[str, float]:
        """Where the time of a rank went, on average."""
        kinds = self.results[0].seconds
        return {
            kind: sum(result.seconds[kind] for result in self.results) / len(self.results) for kind in kinds
        }


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
