"""Defines the `engine.embedded` section: what only the embedded engine has."""

from typing import Literal

from pydantic import Field

from penstock.config import Section

RecordRouting = Literal["auto", "off", "on"]

SPARE_SLOTS = 1
"""Slots of adapters beyond one for each policy: an update is loaded there before it is served."""


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
    """Upper bound of the cache in GB when kv_tokens is 0. 0 is, on a GPU, what memory_share leaves beside
    weights and workspace, and 2 on a CPU."""
    memory_share: float = Field(default=0.0, ge=0, le=1)
    """On a GPU: share of the GPU's memory that one engine may take in all, weights, cache and workspace. 0
    chooses: 0.9 when engines have the GPU to themselves, and beside the trainer what its estimate leaves."""
    kv_dtype: Literal["auto", "float8"] = "auto"
    """Number format of the cache; `auto` is that of the weights. `float8` (e4m3, on a GPU only) halves the cache
    and what attention reads, and rounds keys and values to two or three digits: logprobs differ more from the
    trainer's, which the step metrics show."""
    logits: Literal["model", "float32"] = "model"
    """Number format of the logits. A model of 16 bits rounds them, and draws from a distribution that is a little
    different from the one that is trained; `float32` keeps what the last matmul adds up to."""
    prefill_chunk: int = Field(default=0, ge=0)
    """Prompt tokens in one forward pass at most; longer prompts are spread over several. 0 takes 512 on a CPU and
    8192 on a GPU."""
    prefix_cache: bool = True
    """Reuse the cache of equal prompt prefixes that were computed under the same weights."""
    keep_finished: int = Field(default=256, ge=0)
    """Finished requests whose cache is kept for forks and later turns while there is room."""
    compile: Literal["auto", "off", "on"] = "auto"
    """On a GPU: fuse the decode step with torch.compile. Slower to start, faster to run. `auto`: on for models of
    100 million parameters and more."""
    window: int = Field(default=8, ge=1, le=256)
    """On a GPU: decode steps replayed between two looks of the scheduler. Longer windows cost less host
    time; new requests and ended sequences wait for the end of a window, and tokens are seen then."""
    adapters: Literal["auto", "unmerged", "merged"] = "auto"
    """How LoRA adapters are served: `unmerged`, beside the weights, several policies in one batch; `merged` into
    the weights, one policy, as fast as the weights alone, with a copy of them kept. `auto` merges DoRA, which is
    always served so, and nothing else."""
    resume_kv: Literal["keep", "recompute"] = "keep"
    """Under `sync.interrupt: abort_resume`: whether answers in flight go on with the keys and values that older
    weights computed, or compute those of their prefix again."""
    max_adapters: int = Field(default=0, ge=0)
    """Policies with an adapter of their own that the engine serves and keeps memory for. A run that trains an
    adapter raises it to 1."""
    max_adapter_rank: int = Field(default=16, ge=1)
    """Largest rank of an adapter. A run that trains an adapter raises it to that one's."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the requests that bring none; unset draws a fresh one at every start."""
