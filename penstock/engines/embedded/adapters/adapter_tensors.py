"""Reads which layers an adapter acts on from the names and shapes of its tensors.

Names are those that peft saves, without `base_model.model.`: `model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.records import TensorSpec, WeightUpdate

SUFFIXES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Names the tensors of an adapter that act on one layer. `magnitude` is empty without DoRA."""

    rank: int
    a: str
    b: str
    magnitude: str = ""


def targets_of(update: WeightUpdate) -> dict[str, Target]:
    """Return the layers that an adapter acts on, by name."""
    found: dict[str, dict[str, TensorSpec]] = {}
    for spec in update.tensors:
        layer, part = split_name(spec.name)
        found.setdefault(layer, {})[part] = spec
    if not found:
        raise PenstockError(f"the adapter of version {update.version} has no tensors")
    return {layer: _target(layer, parts) for layer, parts in found.items()}


def split_name(name: str) -> tuple[str, str]:
    """Return the layer that a tensor acts on, and its part: `A`, `B` or `magnitude`."""
    for suffix, part in SUFFIXES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), part
    known = ", ".join(suffix.lstrip(".") for suffix in SUFFIXES)
    raise PenstockError(
        f"tensors of an adapter must end in {known}, got {name}; of peft's adapters this engine serves LoRA "
        "on linear layers, without biases or layers that are saved whole"
    )


def largest_rank(targets: Iterable[Target]) -> int:
    return max(target.rank for target in targets)


def _target(layer: str, parts: dict[str, TensorSpec]) -> Target:
    a, b = parts.get("A"), parts.get("B")
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        shapes = {part: spec.shape for part, spec in sorted(parts.items())}
        raise PenstockError(
            f"an adapter needs lora_A (rank, in) and lora_B (out, rank) for {layer}, got {shapes}"
        )
    magnitude = parts["magnitude"].name if "magnitude" in parts else ""
    return Target(rank=a.shape[0], a=a.name, b=b.name, magnitude=magnitude)
