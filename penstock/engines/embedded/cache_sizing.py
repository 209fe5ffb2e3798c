"""Decides how many blocks the cache gets: what full batches need, within the memory that the engine may take.

These are pure functions of numbers; only `device_memory` asks the device.
"""

from dataclasses import dataclass

import torch
from torch import nn

from penstock.engines.embedded.config import SPARE_SLOTS, EmbeddedConfig
from penstock.errors import UserError

CPU_CACHE_BYTES = int(2e9)
ALONE = 0.9
"""Share of a GPU's memory that an engine takes unless `memory_share` is set."""
SMALLEST_CACHE_TOKENS = 2048
FIXED_WORKSPACE_BYTES = int(1.5e9)
"""CUDA's own context, graphs and the libraries' buffers."""
BYTES_PER_LOGIT = 24
"""Memory for a logit of the full batch: two formats, and a sort with its indices where top-p needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Describes a GPU as a process sees it. `used_bytes` is what this process holds already, mostly weights."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Read the memory of a GPU. Return None on a CPU, where a fixed number of bytes bounds the cache instead."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes=total, free_bytes=free, used_bytes=torch.cuda.memory_reserved(device))


def workspace_bytes(max_batch: int, vocabulary: int) -> int:
    """Estimate what an engine needs besides weights and cache."""
    return FIXED_WORKSPACE_BYTES + BYTES_PER_LOGIT * max_batch * vocabulary


def adapter_bytes(config: EmbeddedConfig, model: nn.Module) -> int:
    """Estimate the memory of adapters that have not arrived yet. Unmerged, it is the matrices of all slots
    beside all linear layers; merged, a copy of the weights below."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    if not config.max_adapters or not layers:
        return 0
    item = layers[0].weight.element_size()
    if config.adapters == "merged":
        return item * sum(layer.weight.numel() for layer in layers)
    widths = sum(layer.in_features + layer.out_features for layer in layers)
    return item * widths * config.max_adapter_rank * (config.max_adapters + SPARE_SLOTS)


def cache_bytes(
    config: EmbeddedConfig, memory: DeviceMemory | None, vocabulary: int, adapters: int = 0
) -> int:
    """Return the most that the cache may take when `kv_tokens` is not set. `adapters` are bytes to leave for
    adapters."""
    if config.cache_gb:
        return int(config.cache_gb * 1e9)
    if memory is None:
        return CPU_CACHE_BYTES
    budget = int((config.memory_share or ALONE) * memory.total_bytes) - memory.used_bytes
    return min(budget, memory.free_bytes) - adapters - workspace_bytes(config.max_batch, vocabulary)


def count_blocks(
    config: EmbeddedConfig,
    *,
    bytes_per_token: int,
    max_context: int,
    vocabulary: int,
    memory: DeviceMemory | None,
    adapters: int = 0,
) -> int:
    """Return the number of blocks for `kv_tokens` if that is set, otherwise for a full batch of full contexts, as
    far as there is room. Raise `UserError` if a GPU has hardly any memory left."""
    size = config.block_size
    if config.kv_tokens:
        return max(1, config.kv_tokens // size)
    wanted = config.max_batch * -(-max_context // size)
    allowed = cache_bytes(config, memory, vocabulary, adapters)
    smallest = min(max_context, SMALLEST_CACHE_TOKENS) * bytes_per_token
    if memory is not None and not config.cache_gb and allowed < smallest:
        raise UserError(
            f"{max(0, allowed) / 1e9:.1f} GB are left for the engine's cache, which needs at least "
            f"{smallest / 1e9:.1f}: of the GPU's {memory.total_bytes / 1e9:.1f} GB "
            f"{memory.free_bytes / 1e9:.1f} are free and the engine may take "
            f"{config.memory_share or ALONE:.0%}, of which it holds {memory.used_bytes / 1e9:.1f} already; "
            "raise engine.embedded.memory_share, lower engine.embedded.max_batch, or make the trainer smaller "
            "(trainer.checkpointing=full, trainer.micro_batch_tokens)"
        )
    return max(1, min(wanted, allowed // (size * bytes_per_token)))
