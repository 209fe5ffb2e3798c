"""Describes everything that the `algorithm` section can name."""

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.kl import KL_ESTIMATORS
from penstock.algorithms.losses import LOSSES
from penstock.algorithms.registry import Description
from penstock.algorithms.returns import TOKEN_ADVANTAGES
from penstock.algorithms.selection import SELECTIONS


def describe() -> tuple[Description, ...]:
    """Return what `penstock list algorithms` prints: kind, name, one line, parameters with their defaults."""
    return (
        *ADVANTAGES.describe(),
        *TOKEN_ADVANTAGES.describe(),
        *LOSSES.describe(),
        *CORRECTIONS.describe(),
        *KL_ESTIMATORS.describe(),
        *SELECTIONS.describe(),
    )
