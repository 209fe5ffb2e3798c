"""`delta_bytes_fraction` and `adapter_bytes_fraction`: what a smaller selection sends, of what full weights take.

Both in bfloat16. The delta is between a version and the one 20 steps of AdamW later, with indices and headers as
they travel; the adapter is one of rank 16 on all linear layers.
"""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.bench.random_adapter import random_adapter
from penstock.bench.sync.publication_source import Trained
from penstock.bench.sync.update_timing import update_bytes
from penstock.interfaces import WeightPublisher
from penstock.sync.in_process import InProcessPublisher
from penstock.sync.slot_publisher import Publishing
from penstock.types import WeightUpdate

STEPS, RANK = 20, 16


def measure_delta(weights: Mapping[str, torch.Tensor], steps: int = STEPS) -> dict[str, Any]:
    """Fractions after all steps, and of the next step alone, which is what a run sends."""
    source = Trained(weights)
    publisher = InProcessPublisher(source.tensors, source.publishing, exchange={})
    full = publish(publisher, 0, source.tensors)
    for step in range(steps):
        source.change(step)
    later = publish(publisher, 1, source.tensors)
    source.change(steps)
    next_step = publish(publisher, 2, source.tensors)
    publisher.close()
    return {
        "full_bytes": update_bytes(full),
        "bytes": update_bytes(later),
        "fraction": update_bytes(later) / update_bytes(full),
        "one_step_fraction": update_bytes(next_step) / update_bytes(full),
    }


def measure_adapter(model: Any, weights: Mapping[str, torch.Tensor], rank: int = RANK) -> dict[str, Any]:
    spec, tensors = random_adapter(model, rank)
    publishing = Publishing(selection="adapter", base=0, adapter=spec, slots=1)
    publisher = InProcessPublisher(tensors, publishing, exchange={})
    sent = update_bytes(publish(publisher, 1, tensors))
    publisher.close()
    full = sum(weight.nbytes for weight in weights.values())
    return {"full_bytes": full, "bytes": sent, "fraction": sent / full}


def publish(publisher: WeightPublisher, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
    publisher.snapshot(version, tensors)
    update = publisher.describe(version)
    publisher.release(version)
    return update
