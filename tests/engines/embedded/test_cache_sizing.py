"""The cache's size from injected numbers of a GPU."""

import pytest

from penstock.engines.embedded.cache_sizing import (
    DeviceMemory,
    adapter_bytes,
    cache_bytes,
    count_blocks,
    workspace_bytes,
)
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.errors import UserError
from tests.engines.embedded.tiny import make_model

VOCABULARY = 1000
WORKSPACE = 1_500_000_000 + 24 * 64 * VOCABULARY
GPU = DeviceMemory(total_bytes=100 * 10**9, free_bytes=95 * 10**9, used_bytes=3 * 10**9)


def test_the_workspace_grows_with_the_batch() -> None:
    assert workspace_bytes(64, VOCABULARY) == WORKSPACE


def test_a_cpu_has_two_gigabytes_unless_told() -> None:
    assert cache_bytes(EmbeddedConfig(), None, VOCABULARY) == 2 * 10**9
    assert cache_bytes(EmbeddedConfig(cache_gb=0.5), None, VOCABULARY) == 5 * 10**8


def test_a_gpu_gives_what_the_share_leaves() -> None:
    assert cache_bytes(EmbeddedConfig(), GPU, VOCABULARY) == 90 * 10**9 - 3 * 10**9 - WORKSPACE
    assert cache_bytes(EmbeddedConfig(memory_share=0.5), GPU, VOCABULARY) == 47 * 10**9 - WORKSPACE
    assert cache_bytes(EmbeddedConfig(memory_share=0.5, cache_gb=7), GPU, VOCABULARY) == 7 * 10**9


def test_never_more_than_is_free() -> None:
    taken = DeviceMemory(total_bytes=100 * 10**9, free_bytes=20 * 10**9, used_bytes=3 * 10**9)
    assert cache_bytes(EmbeddedConfig(), taken, VOCABULARY) == 20 * 10**9 - WORKSPACE


def blocks(config: EmbeddedConfig, memory: DeviceMemory | None, bytes_per_token: int = 1000) -> int:
    return count_blocks(
        config,
        bytes_per_token=bytes_per_token,
        max_context=4096,
        vocabulary=VOCABULARY,
        memory=memory,
    )


def test_blocks_are_what_full_batches_need_or_what_there_is() -> None:
    assert blocks(EmbeddedConfig(max_batch=2), GPU) == 2 * 256
    assert blocks(EmbeddedConfig(kv_tokens=100), GPU) == 6
    room = 47 * 10**9 - WORKSPACE
    assert blocks(EmbeddedConfig(memory_share=0.5), GPU, bytes_per_token=10**6) == room // (16 * 10**6)


def test_too_little_for_a_cache_names_the_settings() -> None:
    expected = (
        r"1\.5 GB are left for the engine's cache, which needs at least 2\.0: of the GPU's 100\.0 GB 95\.0 are "
        r"free and the engine may take 6%, of which it holds 3\.0 already; raise engine\.embedded\.memory_share, lower "
        r"engine\.embedded\.max_batch, or make the trainer smaller"
    )
    with pytest.raises(UserError, match=expected):
        blocks(EmbeddedConfig(memory_share=0.06), GPU, bytes_per_token=10**6)
    assert blocks(EmbeddedConfig(memory_share=0.06, cache_gb=1), GPU, bytes_per_token=10**6) == 62


def test_adapters_that_will_come_take_their_part_of_the_memory() -> None:
    model = make_model("llama")
    assert adapter_bytes(EmbeddedConfig(), model) == 0
    widths = 3 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))  # three layers, four bytes a number
    assert adapter_bytes(EmbeddedConfig(max_adapters=1), model) == 4 * widths * 16 * 2
    assert adapter_bytes(EmbeddedConfig(max_adapters=3, max_adapter_rank=8), model) == 4 * widths * 8 * 4
    weights = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert adapter_bytes(EmbeddedConfig(max_adapters=1, adapters="merged"), model) == 4 * weights
    plain = cache_bytes(EmbeddedConfig(), GPU, VOCABULARY)
    assert cache_bytes(EmbeddedConfig(), GPU, VOCABULARY, adapters=5 * 10**9) == plain - 5 * 10**9
