"""Plans a step: which rank trains what, with step-wide denominators, as data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from penstock.loop.admission import Samples, StepGroups
from penstock.loop.history import VersionHistory
from penstock.records import ScoredGroup, StepPlan, StepResult, merge_metrics, metric_values


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """Describes a finished step: what went in, what each rank reported, and how long the trainer waited for it."""

    number: int
    taken: StepGroups
    results: Sequence[StepResult]
    waited_s: float
    took_s: float
    time_s: float
    waits: dict[str, float] = field(default_factory=dict)
    """`waited_s` by cause."""

    @property
    def idle_share(self) -> float:
        """Return the share of the step's time in which the trainer waited for groups."""
        return self.waited_s / max(1e-9, self.waited_s + self.took_s)

    def metrics(self) -> dict[str, float]:
        """Merge the metrics of all ranks into those of the step."""
        return metric_values(merge_metrics([result.metrics for result in self.results]))

    def own_metrics(self) -> tuple[str, ...]:
        """List the metrics that a user's loss reports."""
        return tuple(dict.fromkeys(name for result in self.results for name in result.own_metrics))

    def seconds(self) -> dict[str, float]:
        """Average the ranks' time by kind of work. A rank without rows has spent none on some kinds."""
        kinds = dict.fromkeys(kind for result in self.results for kind in result.seconds)
        return {
            kind: sum(result.seconds.get(kind, 0.0) for result in self.results) / len(self.results)
            for kind in kinds
        }


class PlanStep(Protocol):
    """Packs sequences into micro-batches (`penstock.trainer.step.packing.plan_step`)."""

    def __call__(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        *,
        ranks: int,
        micro_batch_tokens: int,
        shared_prompts: bool,
        samples: Sequence[Samples],
        policy: str,
        publishes: int | None,
        age_of: Sequence[Callable[[int], int]],
        fresh: tuple[int, ...],
        traced: tuple[tuple[int, int], ...],
    ) -> tuple[StepPlan, ...]: ...


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Packs the groups of a step into one plan per rank."""

    plan_step: PlanStep
    ranks: int
    micro_batch_tokens: int
    shared_prompts: bool = True
    traced: int = 0
    """How many answers of a step the trainer traces token by token."""

    def plan(self, taken: StepGroups, history: VersionHistory, publishes: int | None) -> tuple[StepPlan, ...]:
        return self.plan_step(
            taken.step + 1,
            [group.scored for group in taken.groups],
            ranks=self.ranks,
            micro_batch_tokens=self.micro_batch_tokens,
            shared_prompts=self.shared_prompts,
            samples=[group.samples for group in taken.groups],
            policy=history.policy,
            publishes=publishes,
            age_of=[group.age_of for group in taken.groups],
            fresh=history.versions_of(taken.step),
            traced=self.choose_traced(taken),
        )

    def choose_traced(self, taken: StepGroups) -> tuple[tuple[int, int], ...]:
        """Choose the episodes whose tokens are kept: neighbouring groups, beginning with another group in every
        step. A whole group says more than one answer of each. The number of the step alone decides."""
        count = len(taken.groups)
        order = [(taken.step + index) % count for index in range(count)]
        episodes = ((place, one) for place in order for one in range(len(taken.groups[place].samples)))
        return tuple(islice(episodes, self.traced))
