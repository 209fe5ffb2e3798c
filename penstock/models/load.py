"""Loads a Hugging Face causal LM and its config, with errors that a user can act on."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import UserError
from penstock.models import attention
from penstock.models.precision import check_matmul, guard_bfloat16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name_or_path: str, *, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """Load the model's own class with our attention, in eval mode. Call `attention.attach` before a forward
    pass."""
    check_device(device)
    attention.register()
    check_supported(load_config(name_or_path, trust_remote_code=trust_remote_code))
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            dtype=DTYPES[dtype],
            attn_implementation=attention.IMPLEMENTATION,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, SafetensorError) as error:
        broken = _broken_weights(Path(name_or_path))
        reason = f"{broken} is broken" if broken is not None else _first_line(error)
        raise UserError(f"model {name_or_path!r} could not be loaded: {reason}") from error
    if torch.device(device).type == "cuda":
        check_matmul(device)
    elif dtype == "bfloat16":
        guard_bfloat16(device)
    return model.to(device).eval()


def resolve_device(device: str) -> str:
    """Replace `auto` by cuda if there is a GPU, else by cpu."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Refuse a GPU that torch can't use."""
    kind, _, number = device.partition(":")
    found = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(number or 0) >= found:
        raise UserError(
            f"there is no device {device}: torch {torch.__version__} can use {found} GPUs here; use cpu, another "
            "number, or another build of torch"
        )


def resolve_dtype(dtype: str, device: str) -> str:
    """Replace `auto` by bfloat16 on a GPU that supports it, else by float32. This is for one process on its own;
    a run decides once for all of its processes (`placement/automatic.py`)."""
    if dtype != "auto":
        return dtype
    on_gpu = torch.device(device).type == "cuda"
    return "bfloat16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def load_config(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Load the model's config alone: cheap, and enough to refuse a bad name before anything heavy starts."""
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        hint = "" if Path(name_or_path).exists() else " (no such folder here, nor in the hub's cache)"
        raise UserError(f"model {name_or_path!r} could not be loaded{hint}: {_first_line(error)}") from error


def _broken_weights(folder: Path) -> Path | None:
    """Return the first weights file whose header can't be read."""
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return path
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def check_supported(config: Any) -> None:
    """Refuse a family by its config alone, before any weights are loaded. Its code must use transformers' attention
    interface, behind which Penstock puts its own attention, and all of its layers must be attention."""
    reason = refusal(config)
    if reason is not None:
        raise UserError(reason)


def refusal(config: Any) -> str | None:
    """Return why models of this config can't be served, in a sentence that names the family, or None if they
    can."""
    family = getattr(config, "model_type", type(config).__name__)
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        return None  # transformers has a better error message, or the model brings its own code
    others = sorted({*(getattr(config.get_text_config(), "layer_types", None) or ())} - ATTENTION_LAYERS)
    if others or model_class._is_stateful:
        return (
            f"{model_class.__name__} can't be served: not all of its layers are plain attention "
            f"({', '.join(others) or 'some are recurrent'}), and engines here keep nothing but keys and values; "
            f"choose a family in which every layer has attention, not {family}"
        )
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return (
            f"{model_class.__name__} can't be served: its code in transformers does not use the attention "
            f"interface, behind which Penstock puts its own attention; choose a family that does, not {family}"
        )
    return None
