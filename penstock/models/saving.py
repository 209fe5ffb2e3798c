"""A model's weights in the number format that its checkpoint came in. The trainer computes in another one."""

import json
from pathlib import Path
from typing import Any

import torch

from penstock.models.published import wire_dtypes

CONFIG = "config.json"


def save_model(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """As `from_pretrained` reads it; `dtype` None saves the weights as they are."""
    if dtype is None:
        model.save_pretrained(folder)
        return
    wanted = wire_dtypes(model, dtype)
    copies: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        # Tied weights stay one tensor, which is then written once.
        if tensor.data_ptr() not in copies:
            copies[tensor.data_ptr()] = tensor.to(device="cpu", dtype=wanted.get(name, tensor.dtype))
        state[name] = copies[tensor.data_ptr()]
    model.save_pretrained(folder, state_dict=state)
    _name_format(folder / CONFIG, str(dtype).removeprefix("torch."))


def _name_format(path: Path, dtype: str) -> None:
    """`save_pretrained` names the format of the live weights, also in the configs inside the config."""

    def renamed(section: dict[str, Any]) -> dict[str, Any]:
        inner = {key: renamed(value) if isinstance(value, dict) else value for key, value in section.items()}
        return {**inner, "dtype": dtype} if "dtype" in section else inner

    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(renamed(config), indent=2) + "\n", encoding="utf-8")
