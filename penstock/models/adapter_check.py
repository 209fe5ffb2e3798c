"""Checks that a run's adapter fits its model before anything heavy is loaded."""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import MissingExtraError, UserError
from penstock.models.adapter_folder import SavedAdapter, read_adapter, tensor_shapes
from penstock.models.config import LoraConfig, ModelConfig
from penstock.models.lora_targets import (
    Shapes,
    adapter_shapes,
    is_head_adapted,
    target_layers,
    weightless_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAdapter:
    lora: LoraConfig
    num_layers: int
    num_parameters: int
    num_frozen: int
    """Parameters of the model itself, which are not trained."""
    is_on_head: bool
    """Whether the output embedding is adapted too."""

    def __str__(self) -> str:
        kind = "DoRA" if self.lora.dora else "LoRA"
        return (
            f"a {kind} adapter of rank {self.lora.rank} on {self.num_layers} layers: {self.num_parameters:,} "
            f"parameters are trained, and the model's {self.num_frozen:,} stay"
        )


def check_adapter(section: ModelConfig, model: str, *, saved: bool = False) -> CheckedAdapter:
    """Refuse an adapter that does not fit the model. `model` is the folder or name that `section.name` resolves
    to. With `saved` the adapter comes from a checkpoint, so the folder it started from is not needed."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("model.lora needs peft: pip install 'penstock[lora]'")
    outline = weightless_model(model, trust_remote_code=section.trust_remote_code)
    lora = section.lora or LoraConfig()
    if section.adapter is not None and not (saved and section.lora is not None):
        adapter = read_adapter(Path(section.adapter))
        shapes = adapter_shapes(outline, adapter.lora)
        if section.lora is not None:
            _refuse_other_settings(section.lora, adapter, shapes, adapter_shapes(outline, section.lora))
        _refuse_other_model(adapter, shapes, section.name)
        lora = adapter.lora
    layers = target_layers(outline, lora)
    return CheckedAdapter(
        lora=lora,
        num_layers=len(layers),
        num_parameters=sum(math.prod(shape) for shape in adapter_shapes(outline, lora).values()),
        num_frozen=sum(parameter.numel() for parameter in outline.parameters()),
        is_on_head=is_head_adapted(outline, layers),
    )


def _refuse_other_settings(asked: LoraConfig, adapter: SavedAdapter, its: Shapes, wanted: Shapes) -> None:
    for name in sorted(asked.model_fields_set - {"targets"}):
        mine, theirs = getattr(asked, name), getattr(adapter.lora, name)
        if mine != theirs:
            raise UserError(
                f"model.lora.{name} must be {theirs}, as in the adapter {adapter.folder}, got {mine}; leave "
                "model.lora out, since the adapter's own settings apply"
            )
    if "targets" in asked.model_fields_set and its.keys() != wanted.keys():
        raise UserError(
            f"model.lora.targets must be the layers of the adapter {adapter.folder} "
            f"({', '.join(adapter.lora.targets)}); leave model.lora out, since the adapter's own settings apply"
        )


def _refuse_other_model(adapter: SavedAdapter, expected: Shapes, model: str) -> None:
    found = tensor_shapes(adapter.folder)
    trained_on = f" (it was trained on {adapter.base})" if adapter.base else ""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"the adapter {adapter.folder} does not fit {model}{trained_on}: {name} must be "
                f"{_shown(expected.get(name))}, got {_shown(found.get(name))}"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "×".join(map(str, shape))
