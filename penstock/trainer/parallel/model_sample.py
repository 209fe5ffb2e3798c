"""A few bytes by which ranks know that they have loaded the same model, before they split it."""

import hashlib

import torch
from torch import nn

VALUES = 64
"""Of each weight: spread over all of it, so that a fine-tuned copy differs."""


def sample_of(model: nn.Module) -> bytes:
    """A digest of names and shapes of all weights, and of some of their values."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // VALUES)].to("cpu", torch.float32)
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        found.update(values.numpy().tobytes())
    return found.digest()
