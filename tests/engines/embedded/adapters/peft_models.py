"""Adapters made by peft over the tiny models, published as a trainer would, and peft's own answers."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from penstock.models.published import published_tensors
from penstock.records import DEFAULT_POLICY, AdapterSpec, WeightUpdate
from penstock.sync.in_process import Exchange, InProcessPublisher, InProcessReceiver
from penstock.sync.slot_publisher import Publishing

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'penstock[lora]'")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(slots=True)
class Adapter:
    """A model with an adapter, as peft runs it, and what a trainer says of it."""

    model: nn.Module
    spec: AdapterSpec
    tensors: dict[str, torch.Tensor]


def make_adapter(
    base: nn.Module, seed: int, *, rank: int = 4, targets: Any = "all-linear", **options: Any
) -> Adapter:
    """A random adapter that changes answers. `options` of peft: use_rslora, use_dora, lora_alpha."""
    torch.manual_seed(1000 + seed)
    config = peft.LoraConfig(
        r=rank,
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **{"lora_alpha": 8, **options},
    )
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.normal_(std=0.2)
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return Adapter(
        model=model,
        spec=AdapterSpec(
            rank=rank, alpha=float(config.lora_alpha), rslora=config.use_rslora, dora=config.use_dora
        ),
        tensors={
            name.removeprefix("base_model.model."): tensor.to(next(base.parameters()).dtype).clone()
            for name, tensor in saved.items()
        },
    )


@dataclass(slots=True)
class World:
    """Publications of full weights and adapters in one process."""

    exchange: Exchange = field(default_factory=dict)
    receiver: InProcessReceiver = field(init=False)

    def __post_init__(self) -> None:
        self.receiver = InProcessReceiver(self.exchange)

    def full(self, model: nn.Module, version: int, policy: str = DEFAULT_POLICY) -> WeightUpdate:
        return self._publish(published_tensors(model), version, Publishing(policy=policy))

    def adapter(
        self, adapter: Adapter, version: int, *, policy: str = DEFAULT_POLICY, base: int = 0
    ) -> WeightUpdate:
        options = Publishing(policy=policy, selection="adapter", base=base, adapter=adapter.spec)
        return self._publish(adapter.tensors, version, options)

    def _publish(
        self, tensors: Mapping[str, torch.Tensor], version: int, options: Publishing
    ) -> WeightUpdate:
        publisher = InProcessPublisher(tensors, options, exchange=self.exchange)
        publisher.snapshot(version, tensors)
        return publisher.describe(version)
