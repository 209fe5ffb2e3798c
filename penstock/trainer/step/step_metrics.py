"""Computes a step's report from the columns of all of its loss tokens: metrics, traces of a few answers, and a
warning if engine and trainer differ too much.

How far the policy is from the one that sampled (ratios, `kl`, `ess`, the engine's gap), ages and advantages are
those of the first pass, before any update. Loss, clipping, entropy and corrections are those of all passes.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.algorithms.tokens import bounded
from penstock.records import FloatArray, Metric, StepPlan, TracedTokens, TrainSequence
from penstock.records.interfaces import Ranks
from penstock.records.metrics import Deviation, Max, Mean, Quantile, SampleSize, Share, Shared, Spread, Sum
from penstock.trainer.step.step_preparation import PreparedRow

AGE_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, None))
"""Token ages that are reported together, first and last; the last bucket is open."""

CORE = ("gap", "advantage", "age", "entropy", "weight", "fresh", "nonfinite", "left_out")
"""Columns with metrics of their own; the mean of every other column is a metric under its own name."""


@dataclass(slots=True)
class StepRecord:
    """Holds losses and columns of every micro-batch of a pass, detached. They stay on their device until
    `fetch`, since fetching one waits for all work queued on the device before."""

    losses: list[torch.Tensor] = field(default_factory=list)
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    routing: list[torch.Tensor] = field(default_factory=list)
    """For rows with recorded routes, the numbers of expert choices: that would have flipped, in all, replayed."""
    own_columns: tuple[str, ...] = ()
    """Names of the columns that a user's loss reports."""
    gap_without_replay: torch.Tensor | None = None
    """|Δ logprob| of a few of the tokens, computed with the live routers' experts."""

    def add(
        self, loss: torch.Tensor, columns: dict[str, torch.Tensor], routing: torch.Tensor | None = None
    ) -> None:
        self.losses.append(loss.detach())
        if routing is not None:
            self.routing.append(routing)
        for name, column in columns.items():
            self.columns.setdefault(name, []).append(column.detach().float())

    def fetch(self) -> None:
        """Copy everything to the host, before the device is given other work."""
        self.losses = [loss.cpu() for loss in self.losses]
        self.columns = {name: [torch.cat(parts).cpu()] for name, parts in self.columns.items()}
        self.routing = [counts.cpu() for counts in self.routing]
        if self.gap_without_replay is not None:
            self.gap_without_replay = self.gap_without_replay.cpu()

    @property
    def loss(self) -> float:
        return sum(float(loss) for loss in self.losses)

    def column(self, name: str) -> torch.Tensor:
        return torch.cat(self.columns.get(name, [torch.zeros(0)]))

    def known(self) -> "StepRecord":
        """Return the record without the tokens that are out of the loss because a logprob was not finite: they
        would make every mean NaN, or look like a policy that has not moved."""
        left_out = self.column("left_out") != 0
        if not bool(left_out.any()):
            return self
        columns = {name: [self.column(name)[~left_out]] for name in self.columns}
        return StepRecord(losses=self.losses, columns=columns, routing=self.routing)


def behaviour_kl(gap: torch.Tensor) -> torch.Tensor:
    """Return KL(behaviour ‖ current) per token by the k3 estimator, from tokens that the behaviour policy
    sampled."""
    return gap.exp() - 1 - gap


def mean_of(values: torch.Tensor) -> Mean:
    return Mean(total=float(values.double().sum()), weight=float(values.numel()))


def summarise(record: StepRecord, plan: StepPlan) -> dict[str, Metric]:
    """Return the metrics of the first pass of one rank's step, by name. Everything is over its loss tokens
    unless named otherwise."""
    record = record.known()
    scores = np.array([score.value for group in plan.scores for score in group], dtype=np.float64)
    gap = record.column("gap")
    metrics: dict[str, Metric] = {
        "num_loss_tokens": Sum(value=float(gap.numel())),
        "reward_mean": Shared(value=float(scores.mean()) if scores.size else 0.0),
        "reward_std": Shared(value=float(scores.std()) if scores.size else 0.0),
    }
    metrics |= routing_facts(record.routing)
    if not gap.numel():
        return metrics
    metrics |= drift(gap)
    metrics |= advantage_facts(record.column("advantage"), record.column("age"))
    metrics |= engine_gap(gap, record.column("fresh"))
    for name, chosen in by_age(record.column("age")):
        metrics[f"tokens_{name}"] = Share(part=float(chosen.sum()), whole=float(chosen.numel()))
        if bool(chosen.any()):
            facts = {key: value for key, value in drift(gap[chosen]).items() if key != "ratio_max"}
            metrics |= {f"{key}_{name}": value for key, value in facts.items()}
    return metrics


def of_pass(record: StepRecord, num_passes: int = 1) -> dict[str, Metric]:
    """Return the metrics of one rank's pass by name; those of all passes, merged, are the step's."""
    num_nonfinite = float(record.column("nonfinite").sum())
    record = record.known()
    metrics: dict[str, Metric] = {
        "loss": Sum(value=record.loss / num_passes),
        "nonfinite_logprobs": Sum(value=num_nonfinite),
    }
    weight, clipped = record.column("weight"), record.column("clip_fraction")
    if not weight.numel():
        return metrics
    metrics |= {
        "entropy": mean_of(record.column("entropy")),
        "correction_weight_mean": mean_of(weight),
        "masked_fraction": mean_of(weight == 0),
    }
    metrics |= {name: mean_of(record.column(name)) for name in record.columns if name not in CORE}
    if clipped.numel():
        for name, chosen in by_age(record.column("age")):
            if bool(chosen.any()):
                metrics[f"clip_fraction_{name}"] = mean_of(clipped[chosen])
    return metrics


def of_last_pass(record: StepRecord) -> dict[str, Metric]:
    """Return how far several passes have moved the policy from the one that sampled, and the share of tokens
    clipped by then."""
    record = record.known()
    gap, clipped = record.column("gap"), record.column("clip_fraction")
    metrics: dict[str, Metric] = {}
    if gap.numel():
        metrics["kl_last_pass"] = mean_of(behaviour_kl(gap))
    if clipped.numel():
        metrics["clip_fraction_last_pass"] = mean_of(clipped)
    return metrics


def routing_facts(counts: list[torch.Tensor]) -> dict[str, Metric]:
    """Return shares of (layer, token) choices of experts, if routes were recorded: replayed ones, those left to the
    router for lack of a record, and replayed ones that the router would have made otherwise."""
    if not counts:
        return {}
    flipped, num_choices, num_replayed = (float(each) for each in torch.stack(counts).sum(dim=0))
    facts: dict[str, Metric] = {
        "routing_replayed": Mean(total=num_replayed, weight=num_choices),
        "routing_fallbacks": Mean(total=num_choices - num_replayed, weight=num_choices),
    }
    if num_replayed:
        facts["routing_flipped"] = Mean(total=flipped, weight=num_replayed)
    return facts


def drift(gap: torch.Tensor) -> dict[str, Metric]:
    """Return how far the current policy is from the one that sampled: ratios, KL, effective sample size."""
    log_ratio = bounded(gap)
    ratio = log_ratio.exp()
    low, middle, high = Quantile.each((1, 50, 99), log_ratio.numpy())
    return {
        "ratio_mean": mean_of(ratio),
        "ratio_max": Max(value=float(ratio.max())),
        "ratio_p01": low,
        "ratio_p50": middle,
        "ratio_p99": high,
        "kl": mean_of(behaviour_kl(gap)),
        "ess": SampleSize.of(gap.numpy()),
    }


def advantage_facts(advantage: torch.Tensor, age: torch.Tensor) -> dict[str, Metric]:
    """Return metrics of advantages and ages, and the ages of good and bad tokens apart: selection may make them
    differ."""
    facts: dict[str, Metric] = {
        "advantage_mean": mean_of(advantage),
        "advantage_std": Deviation.of(advantage.numpy()),
        "advantage_max": Max(value=float(advantage.abs().max())),
        "zero_advantage_fraction": mean_of(advantage == 0),
        "staleness_mean": mean_of(age),
        "staleness_max": Max(value=float(age.max())),
        "version_spread": Spread(low=float(age.min()), high=float(age.max())),
    }
    for name, chosen in (("positive", advantage > 0), ("negative", advantage < 0)):
        if bool(chosen.any()):
            facts[f"staleness_{name}"] = mean_of(age[chosen])
    return facts


def engine_gap(gap: torch.Tensor, fresh: torch.Tensor) -> dict[str, Metric]:
    """Return |Δ logprob| between engine and trainer on fresh tokens (`fresh_of`): only there is the gap due to
    nothing else."""
    alone = gap[fresh != 0].abs()
    if not alone.numel():
        return {}
    return {"logprob_gap_mean": mean_of(alone), "logprob_gap_max": Max(value=float(alone.max()))}


def by_age(age: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names of age buckets, `age_2_3` and so on, and which tokens are in each."""
    for first, last in AGE_BUCKETS:
        if last is None:
            yield f"age_{first}_up", age >= first
        else:
            name = f"age_{first}" if first == last else f"age_{first}_{last}"
            yield name, (age >= first) & (age <= last)


log = logging.getLogger(__name__)


class GapWatch:
    """Warns if engine and trainer differ too much on tokens of the same weights, and counts the steps whose mean
    gap is above `limit`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.num_warnings = 0

    def see(self, metrics: dict[str, Metric], step: int, ranks: Ranks) -> None:
        """Compute the gap over all ranks; warn the first and every 100th time it is above the limit. `metrics`
        are this rank's."""
        mean, largest = metrics.get("logprob_gap_mean"), metrics.get("logprob_gap_max")
        own = np.zeros(3)
        if isinstance(mean, Mean) and isinstance(largest, Max):
            own[:] = mean.total, mean.weight, largest.value
        total, weight, most = np.array(ranks.gather(own)).T
        gap = total.sum() / weight.sum() if weight.sum() else 0.0
        if gap <= self._limit:
            return
        if self.num_warnings % 100 == 0 and ranks.rank == 0:
            log.warning(
                "step %d: the engine's and the trainer's logprobs of the same weights differ by %.3g on "
                "average (at most %.3g; the limit is %.3g). Look at: the dtypes of engine and trainer, "
                "top-k/top-p/min-p without recorded sampling masks, penalties or logit bias in the "
                "sampling, and whether the weights' fingerprints are verified",
                step,
                gap,
                most.max(),
                self._limit,
            )
        self.num_warnings += 1


MAX_TOKENS = 65_536
"""The most loss tokens of a step that are traced; the first answer is traced whole, however long."""


def trace_tokens(record: StepRecord, rows: Sequence[PreparedRow], plan: StepPlan) -> tuple[TracedTokens, ...]:
    """Return single tokens of a pass over these rows: those of the answers that the plan names, and of the one on
    which engine and trainer differ most."""
    if not plan.traced:
        return ()
    columns = {name: record.column(name).numpy() for name in ("gap", "advantage", "weight", "clip_fraction")}
    columns["gap"] = np.where(record.column("left_out").numpy() != 0, np.nan, columns["gap"])
    spans = _spans(rows)
    asked = set(plan.traced)
    chosen = [span for span in spans if (span[0].group, span[0].episode) in asked]
    widest = _widest(spans, columns["gap"])
    if widest is not None and all(span is not widest for span in chosen):
        chosen.insert(0, widest)
    traces: list[TracedTokens] = []
    num_tokens = 0
    for sequence, tokens in chosen:
        num_tokens += tokens.stop - tokens.start
        if traces and num_tokens > MAX_TOKENS:
            break
        traces.append(_trace(sequence, {name: column[tokens] for name, column in columns.items()}))
    return tuple(traces)


Span = tuple[TrainSequence, slice]


def _spans(rows: Sequence[PreparedRow]) -> list[Span]:
    """Return each sequence with the span of its loss tokens in the columns."""
    spans, start = list[Span](), 0
    for prepared in rows:
        for sequence, count in zip(prepared.row.sequences, prepared.row.counts, strict=True):
            spans.append((sequence, slice(start, start + count)))
            start += count
    return spans


def _widest(spans: Sequence[Span], gaps: FloatArray) -> Span | None:
    if not spans:
        return None
    sizes = np.nan_to_num(np.abs(gaps[: spans[-1][1].stop]), nan=0.0)
    starts = [tokens.start for _, tokens in spans]
    return spans[int(np.argmax(np.maximum.reduceat(sizes, starts)))] if sizes.size else None


def _trace(sequence: TrainSequence, columns: dict[str, FloatArray]) -> TracedTokens:
    clipped = columns["clip_fraction"]
    return TracedTokens(
        group=sequence.group,
        episode=sequence.episode,
        number=sequence.number,
        gaps=columns["gap"].astype(np.float32),
        advantages=columns["advantage"].astype(np.float32),
        weights=columns["weight"].astype(np.float32),
        clipped=clipped.astype(np.float32) if clipped.size == columns["gap"].size else None,
    )
