"""Loads a Hugging Face causal LM, with errors that a user can act on."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from penstock.errors import UserError
from penstock.models import attention
from penstock.models.precision import check_matmul, guard_bfloat16
from penstock.models.support import check_supported, first_line, load_config

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
        reason = f"{broken} is broken" if broken is not None else first_line(error)
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


def _broken_weights(folder: Path) -> Path | None:
    """Return the first weights file whose header can't be read."""
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return path
    return None
