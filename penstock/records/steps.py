"""Defines one optimizer step as data, and what a rank reports of it."""

from penstock.records.base import DEFAULT_POLICY, FloatArray, Record
from penstock.records.episodes import Sample
from penstock.records.metrics import Metric, metric_values
from penstock.records.scores import Score


class TrainSequence(Record, frozen=True, kw_only=True):
    """Pairs a sample with its origin: `group` and `episode` index into the plan's `scores`."""

    sample: Sample
    """The sample to train on."""
    group: int
    """Which group of the plan."""
    episode: int
    """Which episode of that group."""
    number: int = 0
    """Which sample of that episode."""


class StepPlan(Record, frozen=True, kw_only=True):
    """Plans one optimizer step for one rank: its micro-batches, and the facts of the whole step (scores of every
    group, denominators) that every rank needs to normalise alike."""

    step: int
    """The optimizer step that this plan makes: 1, 2, …"""
    policy: str = DEFAULT_POLICY
    """The policy that is trained."""
    publishes: int | None = None
    """The version under which the new weights are published; None publishes nothing."""
    ages: tuple[dict[int, int], ...] = ()
    """For each group, the age of every version that sampled its loss tokens: steps from the weights of that
    version to those for which the group was first selected."""
    fresh: tuple[int, ...] = ()
    """The versions whose weights are exactly those being trained."""
    scores: tuple[tuple[Score, ...], ...]
    """Scores of all episodes of the step, by group; the same on every rank."""
    micro_batches: tuple[tuple[TrainSequence, ...], ...]
    """What this rank trains on, packed into forward and backward passes."""
    num_loss_tokens: int
    """Loss tokens of all ranks."""
    num_sequences: int
    """Sequences with at least one loss token, over all ranks."""
    num_tokens: tuple[tuple[int, ...], ...] = ()
    """Sampled tokens of every episode, aligned with `scores`."""
    columns: tuple[str, ...] = ()
    """Names of the token columns that any sample of the step has, on any rank."""
    traced: tuple[tuple[int, int], ...] = ()
    """Answers to trace, as group and episode. If there are any, the answer with the widest gap is traced
    too."""


class TracedTokens(Record, frozen=True, kw_only=True):
    """Reports what the trainer knows of a sample's loss tokens, in order, before the step's first update.
    `group`, `episode` and `number` are those of its `TrainSequence`."""

    group: int
    """Which group of the plan."""
    episode: int
    """Which episode of that group."""
    number: int
    """Which sample of that episode."""
    gaps: FloatArray
    """The trainer's logprob minus the engine's; NaN where one is not finite."""
    advantages: FloatArray
    """The advantage that each token was trained with."""
    weights: FloatArray
    """The weight that corrections give each token; 0 takes it out of the loss."""
    clipped: FloatArray | None = None
    """1 where the loss clipped; None for a loss without clipping."""


class StepResult(Record, frozen=True, kw_only=True):
    """Reports a step of one rank: metrics by name, ready to be merged with those of other ranks, and where its
    time went."""

    step: int
    """The step that was made."""
    metrics: dict[str, Metric]
    """The metrics, by name."""
    seconds: dict[str, float]
    """How long each part of the step took."""
    traces: tuple[TracedTokens, ...] = ()
    """The answers that the plan asks to trace, as far as this rank trained them."""
    own_metrics: tuple[str, ...] = ()
    """Names of the metrics that a user's loss reports."""

    def values(self) -> dict[str, float]:
        """Return the metrics of this rank alone as numbers."""
        return metric_values(self.metrics)


class CheckpointWritten(Record, frozen=True, kw_only=True):
    """Reports that a checkpoint is durable."""

    seconds: float
    """Time since the moment whose state it holds. Steps continued meanwhile."""
    num_bytes: int
    """Its size on the disk."""
