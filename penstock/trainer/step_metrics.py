"""What a step says about itself, computed from the flat columns of all of its loss tokens."""

from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.algorithms.tokens import bounded
from penstock.types import StepPlan

AGE_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, None))
"""Token ages that are reported together, first and last; the last bucket is open."""

CORE = ("gap", "advantage", "age", "entropy", "weight")
"""Columns that `summarise` reads itself; the mean of every other column is a metric under its own name."""


@dataclass(slots=True)
class StepRecord:
    """Losses and columns of every micro-batch of a pass, detached. They stay on their device until `fetch`, since
    fetching one waits for all that the device was given before."""

    losses: list[torch.Tensor] = field(default_factory=list)
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, loss: torch.Tensor, columns: dict[str, torch.Tensor]) -> None:
        self.losses.append(loss.detach())
        for name, column in columns.items():
            self.columns.setdefault(name, []).append(column.detach().float())

    def fetch(self) -> None:
        """Copy everything to the host, before the device is given other work."""
        self.losses = [loss.cpu() for loss in self.losses]
        self.columns = {name: [torch.cat(parts).cpu()] for name, parts in self.columns.items()}

    @property
    def loss(self) -> float:
        return sum(float(loss) for loss in self.losses)

    def column(self, name: str) -> torch.Tensor:
        return torch.cat(self.columns.get(name, [torch.zeros(0)]))


def effective_sample_size(log_weights: torch.Tensor) -> float:
    """(Σw)² / (n Σw²) of importance weights: 1 when all are equal, 1/n when one has it all."""
    if not log_weights.numel():
        return 1.0
    weights = (log_weights - log_weights.max()).double().exp()
    return float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum()))


def behaviour_kl(gap: torch.Tensor) -> torch.Tensor:
    """KL(behaviour ‖ current) per token by the k3 estimator, from tokens that the behaviour sampled."""
    return gap.exp() - 1 - gap


def summarise(record: StepRecord, plan: StepPlan) -> dict[str, float]:
    """Metrics of one rank's step by name. Everything is over its loss tokens unless named otherwise."""
    scores = np.array([score.value for group in plan.scores for score in group], dtype=np.float64)
    gap = record.column("gap")
    metrics = {
        "loss": record.loss,
        "num_loss_tokens": float(gap.numel()),
        "reward_mean": float(scores.mean()) if scores.size else 0.0,
        "reward_std": float(scores.std()) if scores.size else 0.0,
    }
    if not gap.numel():
        return metrics
    weight = record.column("weight")
    metrics |= {
        "entropy": float(record.column("entropy").mean()),
        "correction_weight_mean": float(weight.mean()),
        "masked_fraction": float((weight == 0).float().mean()),
    }
    metrics |= drift(gap)
    metrics |= advantage_facts(record.column("advantage"), record.column("age"))
    metrics |= engine_gap(gap, record.column("age"))
    metrics |= {name: float(record.column(name).mean()) for name in record.columns if name not in CORE}
    metrics |= by_age(record)
    return metrics


def drift(gap: torch.Tensor) -> dict[str, float]:
    """How far the current policy is from the one that sampled: ratios, KL, effective sample size."""
    ratio = bounded(gap).exp()
    low, middle, high = np.percentile(ratio.numpy(), (1, 50, 99))
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ratio_p01": float(low),
        "ratio_p50": float(middle),
        "ratio_p99": float(high),
        "kl": float(behaviour_kl(gap).mean()),
        "ess": effective_sample_size(gap),
    }


def advantage_facts(advantage: torch.Tensor, age: torch.Tensor) -> dict[str, float]:
    """Advantages and ages, and the ages of good and bad tokens apart: selection may make them differ."""
    facts = {
        "advantage_mean": float(advantage.mean()),
        "advantage_std": float(advantage.std(unbiased=False)),
        "advantage_max": float(advantage.abs().max()),
        "zero_advantage_fraction": float((advantage == 0).float().mean()),
        "staleness_mean": float(age.mean()),
        "staleness_max": float(age.max()),
        "version_spread": float(age.max() - age.min()),
    }
    for name, chosen in (("positive", advantage > 0), ("negative", advantage < 0)):
        if bool(chosen.any()):
            facts[f"staleness_{name}"] = float(age[chosen].mean())
    return facts


def engine_gap(gap: torch.Tensor, age: torch.Tensor) -> dict[str, float]:
    """|Δ logprob| between engine and trainer, on tokens of the current version, where it is nothing else."""
    fresh = gap[age == 0].abs()
    if not fresh.numel():
        return {}
    return {"logprob_gap_mean": float(fresh.mean()), "logprob_gap_max": float(fresh.max())}


def by_age(record: StepRecord) -> dict[str, float]:
    """Drift and clip fraction for each bucket of ages that has tokens, as `ess_age_2_3` and so on."""
    age, gap, clipped = record.column("age"), record.column("gap"), record.column("clip_fraction")
    metrics: dict[str, float] = {}
    for first, last in AGE_BUCKETS:
        chosen = age >= first if last is None else (age >= first) & (age <= last)
        if not bool(chosen.any()):
            continue
        name = (
            f"age_{first}" if first == last else f"age_{first}_up" if last is None else f"age_{first}_{last}"
        )
        facts = {key: value for key, value in drift(gap[chosen]).items() if key != "ratio_max"}
        if clipped.numel():
            facts["clip_fraction"] = float(clipped[chosen].mean())
        facts["tokens"] = float(chosen.float().mean())
        metrics |= {f"{key}_{name}": value for key, value in facts.items()}
    return metrics
