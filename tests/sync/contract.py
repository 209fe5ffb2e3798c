"""What every transport must do."""

from collections.abc import Mapping

import torch

from penstock.interfaces import Verification, WeightReceiver
from penstock.types import WeightUpdate


def load(receiver: WeightReceiver, update: WeightUpdate, live: Mapping[str, torch.Tensor]) -> Verification:
    """Stage and load, as an engine does."""
    return receiver.load(receiver.stage(update), live)
