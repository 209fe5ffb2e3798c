"""One optimizer step as data, and what a rank reports of it."""

from penstock.records.base import DEFAULT_POLICY, FloatArray, Record
from penstock.records.episodes import Sample
from penstock.records.metrics import Metric, metric_values
from penstock.records.scores import Score


class TrainSequence(Record, frozen=True, kw_only=True):
    """A sample and where it comes from: `group` and `episode` index into the plan's `scores`."""

    sample: Sample
    """What is trained on."""
    group: int
    """Which group of the plan."""
    episode: int
    """Which episode of that group."""
    number: int = 0
    """Which sample of that episode."""


class StepPlan(Record, frozen=True, kw_only=True):
    """One optimizer step for one rank, as data: its micro-batches, and the step-wide facts (scores of
    every group, denominators) that every rank needs to normalise alike."""

    step: int
    """The optimizer step that this plan makes: 1, 2, …"""
    policy: str = DEFAULT_POLICY
    """Whose weights are trained."""
    publishes: int | None = None
    """The version under which the weights that it makes are published; None publishes nothing."""
    ages: tuple[dict[int, int], ...] = ()
    """By group, the age of every version that sampled tokens of its loss: steps from the weights of that version to
    those for which the group was first selected."""
    fresh: tuple[int, ...] = ()
    """The versions that hold the very weights that are trained."""
    scores: tuple[tuple[Score, ...], ...]
    """Of every episode of the step, by group, on every rank."""
    micro_batches: tuple[tuple[TrainSequence, ...], ...]
    """What this rank trains on, packed into forward and backward passes."""
    num_loss_tokens: int
    """Over all ranks."""
    num_sequences: int
    """Sequences with at least one loss token, over all ranks."""
    num_tokens: tuple[tuple[int, ...], ...] = ()
    """Sampled tokens of every episode, aligned with `scores`."""
    columns: tuple[str, ...] = ()
    """Names of the token columns that any sample of the step has, on whatever rank."""
    traced: tuple[tuple[int, int], ...] = ()
    """Answers whose tokens are asked for, as group and episode; with any, the one with the widest gap comes too."""


class TracedTokens(Record, frozen=True, kw_only=True):
    """What the trainer knows of a sample's loss tokens, in their order, before the step's first update. `group`,
    `episode` and `number` are those of its `TrainSequence`."""

    group: int
    """Which group of the plan."""
    episode: int
    """Which episode of that group."""
    number: int
    """Which sample of that episode."""
    gaps: FloatArray
    """The trainer's logprob minus the engine's; NaN where one is not finite."""
    advantages: FloatArray
    """What each token was trained with."""
    weights: FloatArray
    """What corrections made of it; 0 takes it out of the loss."""
    clipped: FloatArray | None = None
    """1 where the loss clipped; None where it does not clip."""


class StepResult(Record, frozen=True, kw_only=True):
    """What one rank reports of a step: metrics by name, ready to be merged with those of other ranks, and where its
    time went."""

    step: int
    """The one that was made."""
    metrics: dict[str, Metric]
    """By name."""
    seconds: dict[str, float]
    """Where its time went, by part."""
    traces: tuple[TracedTokens, ...] = ()
    """Of the answers that the plan asks for, as far as this rank trained them."""
    own_metrics: tuple[str, ...] = ()
    """Names of the metrics that a user's loss reports."""

    def values(self) -> dict[str, float]:
        """Its metrics as numbers, of this rank alone."""
        return metric_values(self.metrics)


class CheckpointWritten(Record, frozen=True, kw_only=True):
    """A checkpoint that is durable."""

    seconds: float
    """From the moment whose state it holds. Steps went on meanwhile."""
    num_bytes: int
    """On the disk."""
