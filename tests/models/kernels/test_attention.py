import pytest
import torch

from tests.models.kernels.device import DEVICE

from penstock.models.kernels.attention import QueryTiles, attend_decode, attend_packed, choose_splits  # isort: skip
from penstock.models.kernels.reference import attend_paged  # isort: skip

BLOCK = 16
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 products
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
@pytest.mark.parametrize("splits", [1, 4])
def test_decoding_equals_the_reference(options, splits):
    lengths = [1, 16, 130, 67]
    query, keys, values, table, sinks = make(lengths, heads=6, kv_heads=2, dim=24, value_dim=16, tokens=4)
    options = {**options, "sinks": sinks if "sinks" in options else None}
    want = attend_paged(query, keys, values, table, lengths, [1] * 4, scaling=0.3, **options)
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = attend_decode(query, keys, values, table, device_lengths, scaling=0.3, splits=splits, **options)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2])
def test_an_empty_row_gives_zeros(splits):
    query, keys, values, table, sinks = make([5, 9], heads=2, kv_heads=1, dim=16, value_dim=16, tokens=2)
    lengths = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    got = attend_decode(query, keys, values, table, lengths, scaling=0.3, splits=splits, sinks=sinks)
    assert got[0].abs().max() == 0
    want = attend_paged(query[1:], keys, values, table[1:], [9], [1], scaling=0.3, sinks=sinks)
    torch.testing.assert_close(got[1:], want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_mixed_batch_equals_the_reference(options):
    """A prompt, a chunk of one, single tokens, and a prompt of several tiles."""
    lengths, counts = [7, 90, 33, 70], [7, 20, 1, 70]
    query, keys, values, table, sinks = make(
        lengths, heads=6, kv_heads=2, dim=16, value_dim=24, tokens=sum(counts)
    )
    options = {**options, "sinks": sinks if "sinks" in options else None}
    want = attend_paged(query, keys, values, table, lengths, counts, scaling=0.3, **options)
    tiles = QueryTiles.of(counts, 3, DEVICE)
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = attend_packed(query, keys, values, table, device_lengths, tiles, scaling=0.3, **options)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dim", [64, 80])
def test_half_precision_is_within_its_rounding(dim):
    lengths = [40, 3]
    query, keys, values, table, _ = make(
        lengths, heads=4, kv_heads=4, dim=dim, value_dim=dim, tokens=2, dtype=HALF
    )
    want = attend_paged(query, keys, values, table, lengths, [1, 1], scaling=dim**-0.5).float()
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = attend_decode(query, keys, values, table, device_lengths, scaling=dim**-0.5).float()
    assert float((got - want).norm() / want.norm()) < 1e-2


def test_splits_fill_the_gpu_and_no_more():
    assert choose_splits(rows=512, kv_heads=2, max_length=8192) == 1
    assert choose_splits(rows=8, kv_heads=2, max_length=8192) == 32
    assert choose_splits(rows=1, kv_heads=2, max_length=300) == 2
    assert choose_splits(rows=1, kv_heads=1, max_length=100) == 1
    assert choose_splits(rows=1, kv_heads=1, max_length=1 << 20) == 64
