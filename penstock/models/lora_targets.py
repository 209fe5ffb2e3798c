"""Finds which layers of a model a LoRA adapter is on, and the shapes of its tensors, without loading weights.

Both the preflight check and the trainer use this, so a run that can't have its adapter ends before it starts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.errors import UserError
from penstock.models.config import ALL_LINEAR, LoraConfig, adapters_on_experts
from penstock.models.support import load_config

SHOWN = 12
"""How many layer names an error message lists."""

Shapes = dict[str, tuple[int, ...]]


def weightless_model(name_or_path: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build a model on the meta device, so that its tensors take no memory."""
    config = load_config(name_or_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def adapter_shapes(model: nn.Module, lora: LoraConfig) -> Shapes:
    """Return the shapes of the adapter's tensors by the names under which they are saved and sent; refuse layers
    that can't be adapted."""
    shapes: Shapes = {}
    for name, layer in target_layers(model, lora).items():
        shapes[f"{name}.lora_A.weight"] = (lora.rank, layer.in_features)
        shapes[f"{name}.lora_B.weight"] = (layer.out_features, lora.rank)
        if lora.dora:
            shapes[f"{name}.lora_magnitude_vector"] = (layer.out_features,)
    return shapes


def target_layers(model: nn.Module, lora: LoraConfig) -> dict[str, nn.Linear]:
    """Return the layers that get an adapter, by name."""
    _refuse_quantised(model)
    targets = all_linear(model) if lora.targets == ALL_LINEAR else lora.targets
    found: dict[str, nn.Linear] = {}
    for target in targets:
        found |= _layers_of_target(model, target)
    return {name: found[name] for name, _ in model.named_modules() if name in found}


def all_linear(model: Any) -> tuple[str, ...]:
    """Return the last name parts of all linear layers but the output embedding."""
    if _has_experts(model):
        raise adapters_on_experts(model.config.model_type)
    ends = sorted({name.rpartition(".")[2] for name in _linear_layers(model)})
    if not ends:
        raise UserError(
            f"{type(model).__name__} has no linear layers (torch.nn.Linear) that an adapter could be on; train "
            "all of it, without model.lora"
        )
    return tuple(ends)


def _layers_of_target(model: nn.Module, target: str) -> dict[str, nn.Linear]:
    modules = dict(model.named_modules())
    matches = {name: module for name, module in modules.items() if _is_named(name, target)}
    parameters = [name for name, _ in model.named_parameters() if _is_named(name, target)]
    kind = type(model).__name__
    if any("experts" in name.split(".") for name in (*matches, *parameters)):
        raise UserError(
            f"model.lora.targets names {target!r}, which are experts of {kind}: adapters on experts are not "
            "supported; name other layers, such as those of the attention"
        )
    if not matches:
        known = sorted({name.rpartition(".")[2] for name in _linear_layers(model)})
        raise UserError(
            f"model.lora.targets names {target!r}, and {kind} has no such layer; its linear layers are: "
            f"{', '.join(known[:SHOWN]) or 'none'}"
        )
    _refuse_embeddings(model, target, matches)
    linear = {name: module for name, module in matches.items() if isinstance(module, nn.Linear)}
    if len(linear) < len(matches):
        other = next(module for module in matches.values() if not isinstance(module, nn.Linear))
        raise UserError(
            f"model.lora.targets names {target!r}, which is a {type(other).__name__} in {kind}: adapters are for "
            "linear layers (torch.nn.Linear)"
        )
    return linear


def _refuse_embeddings(model: Any, target: str, matches: Mapping[str, nn.Module]) -> None:
    """Refuse the input embedding, and an output embedding that is tied to it."""
    if any(module is model.get_input_embeddings() for module in matches.values()):
        why = "adapters are for linear layers"
    elif is_head_adapted(model, matches) and model.config.get_text_config().tie_word_embeddings:
        why = "its two embeddings are one tensor, and an adapter on one would change both"
    else:
        return
    raise UserError(
        f"model.lora.targets must not name {target!r} of {type(model).__name__}: {why}; leave it out"
    )


def is_head_adapted(model: Any, layers: Mapping[str, nn.Module]) -> bool:
    """Return whether the output embedding is among these layers."""
    return any(layer is model.get_output_embeddings() for layer in layers.values())


def _refuse_quantised(model: Any) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            f"the weights of {type(model).__name__} are quantised, and adapters are trained on weights that are "
            "not; name the model that they were made from"
        )


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }


def _has_experts(model: nn.Module) -> bool:
    return any("experts" in name.split(".") for name, _ in model.named_modules())


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
