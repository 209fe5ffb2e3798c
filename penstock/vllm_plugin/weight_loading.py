"""Loads new weights into vLLM's model layer by layer, as from a checkpoint, and verifies them."""

import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.errors import FingerprintMismatch
from penstock.models.published import as_checkpoint
from penstock.sync.fingerprint import compare
from penstock.vllm_plugin.load_verifier import PACKING, PROCESS, LoadVerifier


def load_weights(
    model: nn.Module,
    model_config: Any,
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, int],
    version: int,
    *,
    is_whole: bool = True,
) -> tuple[float, list[str]]:
    """Load `tensors` and compare what the layers then hold with the `expected` fingerprints. Return the seconds
    that loading took, and the tensors that were not found in vLLM's layers: only their arrival was verified.
    Without `is_whole` (the model is one shard of several) that is all of them. Raise `FingerprintMismatch` when a
    layer differs."""
    forget_packed_experts(model)
    started = time.perf_counter()
    verifier = LoadVerifier(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with torch.no_grad(), verifier.watching():
        initialize_layerwise_reload(model)
        model.load_weights(as_checkpoint(tensors.items()))  # type: ignore[operator]
        finalize_layerwise_reload(model, model_config)
    pack_tied(model, verifier.packed)
    took_s = time.perf_counter() - started
    found = verifier.found if is_whole else {}
    missing = [name for name in expected if name not in found]
    compare({name: value for name, value in expected.items() if name in found}, found, version)
    return took_s, missing


def forget_packed_experts(model: nn.Module) -> None:
    """Drop the kernels of packed experts. vLLM packs them for a CPU only when their kernel is made, so it would
    read new weights in the layout of the old ones. Without a kernel it makes a new one."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied(model: nn.Module, packed: AbstractSet[int]) -> None:
    """Pack the layers that share a tensor with the layer that loaded it. vLLM packs only that layer, so an
    output embedding tied to the input embedding would continue with its old packed weights."""
    layers: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            layers.setdefault(id(parameter), []).append(module)
    for sharing in layers.values():
        for layer in sharing if len(sharing) > 1 else ():
            method: Any = getattr(layer, PACKING, None)
            if id(layer) not in packed and hasattr(method, PROCESS):
                getattr(method, PROCESS)(layer)


def check_fits(shapes: Mapping[str, tuple[int, ...]], config: Any, version: int) -> None:
    """Raise `FingerprintMismatch` unless the vocabulary and width of the embedding are the model's own. This
    runs before anything is changed."""
    wanted = (getattr(config, "vocab_size", None), getattr(config, "hidden_size", None))
    if None in wanted:
        return
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and shape != wanted:
            raise FingerprintMismatch(
                f"version {version}: {name} has shape {shape}, and vLLM's model has {wanted}; trainer and engine "
                "must load the same model"
            )
