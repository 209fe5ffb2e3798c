"""Saves a model's weights in the number format of its checkpoint; the trainer may compute in another one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.checksums import Checksum
from penstock.models.published import wire_dtypes
from penstock.models.tensor_file import write_tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def save_model(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Save a model so that `from_pretrained` can read it. `dtype` None saves the weights as they are."""
    write_config(model, folder, dtype)
    write_weights(model, folder, dtype, model.state_dict())


def write_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Save everything but the weights: config, generation settings, the model's own code. Training changes none
    of it."""
    model.save_pretrained(folder, state_dict={})
    (folder / WEIGHTS).unlink(missing_ok=True)
    if dtype is not None:
        _name_format(folder / CONFIG, str(dtype).removeprefix("torch."))


def write_weights(
    model: Any, folder: Path, dtype: torch.dtype | None, state: Mapping[str, torch.Tensor]
) -> dict[Path, Checksum]:
    """Save the weights alone, under the names of the family's published checkpoints. `state` is the model's
    state dict, or a copy that training does not change meanwhile."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name: tensor for name, tensor in state.items() if name not in left_out}
    named = remove_tied_weights_from_state_dict(_in_format(model, kept, dtype), model)
    path = folder / WEIGHTS
    return {path: write_tensors(path, revert_weight_conversion(model, named))}


def _in_format(
    model: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    if dtype is None:
        return dict(state)
    wanted = wire_dtypes(model, dtype)
    copies: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        # Tied weights stay one tensor, which is then written once.
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = tensor.to(device="cpu", dtype=wanted.get(name, tensor.dtype))
    return {name: copies[tensor.data_ptr()] for name, tensor in state.items()}


def _name_format(path: Path, dtype: str) -> None:
    """Correct the dtype in the config and in the configs inside it: `save_pretrained` wrote that of the weights in
    memory, not of the saved ones."""

    def renamed(section: dict[str, Any]) -> dict[str, Any]:
        inner = {key: renamed(value) if isinstance(value, dict) else value for key, value in section.items()}
        return {**inner, "dtype": dtype} if "dtype" in section else inner

    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(renamed(config), indent=2) + "\n", encoding="utf-8")
