"""Policy losses give each token a loss to be minimised, made of ratios and advantages.

A loss reads `LossTokens` and leaves averaging to the trainer, whose denominators span the whole step. Its
ratio is r = π/π_old, where π_old is the recorded behaviour policy (default) or the policy at the start of the
step (`proximal: start`). Correction weights multiply every token's loss. Each loss reports the fact
`clip_fraction`: the tokens whose policy gradient it cut to zero or bounded.
"""

from penstock.algorithms.losses import clipped, sequence_level, trust, weighted
from penstock.algorithms.losses.loss_registry import (
    COVERS_BEHAVIOUR,
    LOSSES,
    result,
    statistic_of,
    step_statistic,
)

__all__ = [
    "COVERS_BEHAVIOUR",
    "LOSSES",
    "clipped",
    "result",
    "sequence_level",
    "statistic_of",
    "step_statistic",
    "trust",
    "weighted",
]
