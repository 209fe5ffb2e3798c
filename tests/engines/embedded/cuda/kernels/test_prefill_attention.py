import pytest
import torch

from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda.kernels.prefill_attention import QueryTiles, attend_packed  # isort: skip
from tests.engines.embedded.cuda.kernels.reference import attend_paged  # isort: skip
from penstock.models.attention_options import AttentionOptions

BLOCK = 16
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 21},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 70, "softcap": 2.0, "sinks": True},
}


def make(lengths, *, heads, kv_heads, dim, value_dim, tokens, dtype=torch.float32):
    """A pool in which keys and values lie side by side, shuffled blocks, and NaN in every unused slot."""
    generator = torch.Generator().manual_seed(0)
    needed = [-(-length // BLOCK) for length in lengths]
    pool = torch.full((sum(needed) + 3, BLOCK, kv_heads, dim + value_dim), float("nan"))
    order = torch.randperm(len(pool), generator=generator)[: sum(needed)]
    table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    start = 0
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        mine = order[start : start + count]
        start += count
        table[row, :count] = mine
        values = torch.randn(count * BLOCK, kv_heads, dim + value_dim, generator=generator)
        values[length:] = float("nan")
        pool[mine] = values.view(count, BLOCK, kv_heads, -1)
    query = torch.randn(tokens, heads, dim, generator=generator)
    sinks = torch.randn(heads, generator=generator)
    pool = pool.to(dtype).to(DEVICE)
    return query.to(dtype).to(DEVICE), pool[..., :dim], pool[..., dim:], table.to(DEVICE), sinks.to(DEVICE)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_mixed_batch_equals_the_reference(options):
    """A prompt, a chunk of one, single tokens, and a prompt of several tiles."""
    lengths, counts = [7, 90, 33, 70], [7, 20, 1, 70]
    query, keys, values, table, sinks = make(
        lengths, heads=6, kv_heads=2, dim=16, value_dim=24, tokens=sum(counts)
    )
    options = AttentionOptions(scaling=0.3, **{**options, "sinks": sinks if "sinks" in options else None})
    want = attend_paged(query, keys, values, table, lengths, counts, options)
    tiles = QueryTiles.of(counts, 3, DEVICE)
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = attend_packed(query, keys, values, table, device_lengths, tiles, options)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
