"""What a step says about itself, computed from the flat columns of all of its loss tokens."""

from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.algorithms.tokens import LossTokens, bounded
from penstock.types import StepPlan


@dataclass(slots=True)
class StepRecord:
    """Detached columns of every micro-batch of a pass, to be read once at its end."""

    loss: float = 0.0
    columns: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, loss: float, columns: dict[str, torch.Tensor]) -> None:
        self.loss += loss
        for name, column in columns.items():
            self.columns.setdefault(name, []).append(column.detach().float().cpu())

    def column(self, name: str) -> torch.Tensor:
        return torch.cat(self.columns.get(name, [torch.zeros(0)]))


CORE = ("gap", "advantage", "age", "entropy", "weight")


def token_columns(tokens: LossTokens, entropy: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "gap": tokens.gap(),
        "advantage": tokens.advantages,
        "age": tokens.ages,
        "entropy": entropy,
        "weight": tokens.weights,
    }


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
    gap, advantage, age = record.column("gap"), record.column("advantage"), record.column("age")
    metrics = {
        "loss": record.loss,
        "num_loss_tokens": float(gap.numel()),
        "reward_mean": float(scores.mean()) if scores.size else 0.0,
        "reward_std": float(scores.std()) if scores.size else 0.0,
    }
    if not gap.numel():
        return metrics
    ratio = bounded(gap).exp()
    metrics |= {
        "advantage_mean": float(advantage.mean()),
        "advantage_std": float(advantage.std(unbiased=False)),
        "advantage_max": float(advantage.abs().max()),
        "zero_advantage_fraction": float((advantage == 0).float().mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "kl": float(behaviour_kl(gap).mean()),
        "ess": effective_sample_size(gap),
        "entropy": float(record.column("entropy").mean()),
        "staleness_mean": float(age.mean()),
        "staleness_max": float(age.max()),
        "correction_weight_mean": float(record.column("weight").mean()),
        "masked_fraction": float((record.column("weight") == 0).float().mean()),
    }
    for percent in (1, 50, 99):
        metrics[f"ratio_p{percent:02d}"] = float(np.percentile(ratio.numpy(), percent))
    fresh = gap[age == 0].abs()
    if fresh.numel():
        metrics["logprob_gap_mean"] = float(fresh.mean())
        metrics["logprob_gap_max"] = float(fresh.max())
    for name in record.columns:
        if name not in CORE:
            metrics[name] = float(record.column(name).mean())
    return metrics
