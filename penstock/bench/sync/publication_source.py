"""Provides what the trainer of `penstock bench sync` publishes: weights that change between versions."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.bench.random_adapter import random_adapter
from penstock.bench.sync.update_arm import UpdateArm
from penstock.sync.slot_publisher import Publishing

LEARNING_RATE = 1e-6
NO_ANCHOR = 1 << 30


class Poked:
    """Changes one value per version, enough for full updates, whose cost does not depend on values."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], publishing: Publishing) -> None:
        self.tensors = tensors
        self.publishing = publishing

    def change(self, version: int) -> None:
        first = next(iter(self.tensors.values())).view(-1)
        first[version % len(first)] = float(version)


class Trained:
    """Trains float32 weights with AdamW, sent as bfloat16. Every step has the same gradient, so all weights keep
    moving in one direction; other gradients would rarely change more of them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], lr: float = LEARNING_RATE) -> None:
        device = next(iter(weights.values())).device
        generator = torch.Generator(device).manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            master = weight.detach().float().clone().requires_grad_()
            master.grad = torch.randn(master.shape, generator=generator, device=device)
            self.tensors[name] = master
        self._optimizer = torch.optim.AdamW(list(self.tensors.values()), lr=lr, foreach=True)
        self.publishing = Publishing(
            selection="delta",
            dtypes=dict.fromkeys(weights, torch.bfloat16),
            anchor_every=NO_ANCHOR,
        )

    def change(self, version: int) -> None:
        self._optimizer.step()


Source = Poked | Trained


def make_source(arm: UpdateArm, model: Any, weights: Mapping[str, torch.Tensor], *, base: int) -> Source:
    """Make the source of an arm. `base` is the version of the engine's full weights."""
    if arm.selection == "delta":
        return Trained(weights)
    if arm.selection == "full":
        return Poked(weights, Publishing())
    spec, tensors = random_adapter(model, arm.rank, ends=arm.layers)
    return Poked(tensors, Publishing(selection="adapter", base=base, adapter=spec))
