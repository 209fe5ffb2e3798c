"""Defines the `engine.embedded` section: what only the embedded engine has."""

from typing import Literal

from pydantic import Field

from penstock.config import Section

RecordRouting = Literal["auto", "off", "on"]

SPARE_SLOTS = 1
"""Adapter slots beyond one per policy: an update is loaded there before it is served."""


class EmbeddedConfig(Section):
    """Configures the embedded engine: its batch, its cache, and how it runs on a GPU."""

    max_batch: int = Field(default=64, ge=1)
    """Sequences in one forward pass at most."""
    block_size: int = Field(default=16, ge=1)
    """Tokens in one block of the paged cache."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens that the cache holds over all sequences; 0 takes what max_batch full contexts need, within
    cache_gb."""
    cache_gb: float = Field(default=0.0, ge=0)
    """Upper bound of the cache in GB when kv_tokens is 0. 0 means 2 on a CPU, and on a GPU what memory_share
    leaves besides weights and workspace."""
    memory_share: float = Field(default=0.0, ge=0, le=1)
    """On a GPU: share of the GPU's memory that one engine may take for weights, cache and workspace together. 0
    means 0.9 when engines have the GPU to themselves, and otherwise what the trainer's estimate leaves."""
    kv_dtype: Literal["auto", "float8"] = "auto"
    """Number format of the cache; `auto` is that of the weights. `float8` (e4m3, on a GPU only) halves the cache
    and what attention reads, and rounds keys and values to two or three digits: logprobs differ more from the
    trainer's, which the step metrics show."""
    logits: Literal["model", "float32"] = "model"
    """Number format of the logits. A 16-bit model rounds them, and so draws from a slightly different
    distribution than the one that is trained; `float32` keeps the sums of the last matmul unrounded."""
    prefill_chunk: int = Field(default=0, ge=0)
    """Prompt tokens in one forward pass at most; longer prompts are spread over several. 0 means 512 on a CPU and
    8192 on a GPU."""
    prefix_cache: bool = True
    """Reuse the cache of equal prompt prefixes that were computed under the same weights."""
    keep_finished: int = Field(default=256, ge=0)
    """Finished requests whose cache is kept for forks and later turns while there is room."""
    compile: Literal["auto", "off", "on"] = "auto"
    """On a GPU: fuse the decode step with torch.compile. Slower to start, faster to run. `auto`: on for models of
    100 million parameters and more."""
    window: int = Field(default=8, ge=1, le=256)
    """On a GPU: decode steps replayed between two runs of the scheduler. Longer windows cost less host time, but
    new requests, ended sequences and drawn tokens wait for the end of a window."""
    adapters: Literal["auto", "unmerged", "merged"] = "auto"
    """How LoRA adapters are served. `unmerged`: beside the weights, with several policies in one batch. `merged`:
    into the weights, of which a copy is kept; one policy, as fast as the weights alone. `auto` merges
    what can't be served unmerged: DoRA, and an adapter on the output embedding."""
    resume_kv: Literal["keep", "recompute"] = "keep"
    """Under `sync.interrupt: abort_resume`: whether answers in flight continue with the keys and values that older
    weights computed, or compute those of their prefix again."""
    max_adapters: int = Field(default=0, ge=0)
    """Policies with an adapter of their own that the engine serves and keeps memory for. A run that trains an
    adapter raises it to 1."""
    max_adapter_rank: int = Field(default=16, ge=1)
    """Largest rank of an adapter. A run that trains an adapter raises it to that adapter's rank."""
    seed: int | None = Field(default=None, ge=0)
    """Seed for requests without one; unset draws a new one at every start."""
