import pytest
import torch

from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda.kernels import decode_attention as decode  # isort: skip
from tests.engines.embedded.cuda.kernels.reference import attend_paged  # isort: skip
from penstock.models.attention_options import AttentionOptions

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16 matmul
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 37},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 70, "softcap": 2.0, "sinks": True},
}


def attend_and_check(
    positions, *, heads, kv_heads, dim, value_dim, splits=1, block=16, dtype=torch.float32, tolerance=2e-5,
    **options,
):  # fmt: skip
    """The newest keys are written, nothing else changes, and the answer is the reference's, whatever lies in the
    pool beside the keys that a row may see."""
    generator = torch.Generator().manual_seed(0)
    rows, needed = len(positions), max(positions) // block + 1
    pool = torch.randn(rows * needed + 3, block, kv_heads, dim + value_dim, generator=generator).to(dtype)
    tables = torch.randperm(len(pool), generator=generator)[: rows * needed].view(rows, needed).int()
    query = torch.randn(rows, heads, dim, generator=generator).to(dtype)
    key = torch.randn(rows, kv_heads, dim, generator=generator).to(dtype)
    value = torch.randn(rows, kv_heads, value_dim, generator=generator).to(dtype)
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads, generator=generator).to(DEVICE)
    places = torch.tensor(positions)
    seen = torch.zeros(pool.shape[:2], dtype=torch.bool)
    for row, place in enumerate(positions):
        known = torch.arange(max(0, place + 1 - options.get("sliding_window", place + 1)), place)
        seen[tables[row, known // block].long(), known % block] = True
    pool[~seen] = torch.nan
    expected = pool.clone()
    expected[tables[torch.arange(rows), places // block].long(), places % block] = torch.cat([key, value], -1)
    pool, tables = pool.to(DEVICE), tables.to(DEVICE)

    got = decode.attend_decode(
        query.to(DEVICE), key.to(DEVICE), value.to(DEVICE), pool, tables, places.to(DEVICE),
        AttentionOptions(scaling=0.3, **options), splits=splits,
    )  # fmt: skip

    torch.testing.assert_close(pool.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    pool = pool.nan_to_num()
    want = attend_paged(
        query.to(DEVICE), pool[..., :dim], pool[..., dim:], tables, [place + 1 for place in positions],
        [1] * rows, AttentionOptions(scaling=0.3, **options),
    )  # fmt: skip
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert float(error) < tolerance


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("splits", [1, 4])
def test_decoding_equals_the_reference_and_writes_the_newest(options, splits, monkeypatch):
    monkeypatch.setattr("penstock.engines.embedded.cuda.kernels.attention_splits.SPLIT_KEYS", 64)
    attend_and_check(
        [0, 15, 64, 188, 129], heads=6, kv_heads=2, dim=24, value_dim=16, splits=splits, **options
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("splits", [1, 4])
def test_heads_that_are_served_together_ignore_each_others_keys(options, splits, monkeypatch):
    monkeypatch.setattr("penstock.engines.embedded.cuda.kernels.attention_splits.SPLIT_KEYS", 64)
    monkeypatch.setattr(decode, "ENOUGH", 1)
    attend_and_check(
        [0, 15, 64, 188, 129], heads=6, kv_heads=2, dim=24, value_dim=16, splits=splits, **options
    )


@pytest.mark.parametrize("window", [1, 5, 37])
@pytest.mark.parametrize("enough", [1, 1024])
def test_windows_may_be_shorter_than_a_step(window, enough, monkeypatch):
    monkeypatch.setattr(decode, "ENOUGH", enough)
    attend_and_check([0, 7, 15, 66], heads=8, kv_heads=2, dim=16, value_dim=16, sliding_window=window)


@pytest.mark.parametrize(("heads", "kv_heads", "together"), [(32, 8, 2), (8, 8, 8), (14, 2, 1), (32, 16, 4)])
def test_a_program_serves_as_many_heads_as_its_tile_has_room_for(heads, kv_heads, together, monkeypatch):
    assert decode.heads_together(4096, kv_heads, heads // kv_heads) == together
    monkeypatch.setattr(decode, "ENOUGH", 1)
    attend_and_check([21, 3, 16, 0, 30, 7, 8, 9], heads=heads, kv_heads=kv_heads, dim=16, value_dim=16)


def test_heads_are_served_together_only_where_programs_are_left_for_the_whole_gpu():
    assert decode.heads_together(rows=512, kv_heads=4, group=4) == 2
    assert decode.heads_together(rows=511, kv_heads=4, group=4) == 1
    assert decode.heads_together(rows=512, kv_heads=4, group=7) == 1
    assert decode.heads_together(rows=512, kv_heads=2, group=3) == 1
    assert decode.heads_together(rows=4096, kv_heads=3, group=3) == 1
    assert decode.heads_together(rows=4096, kv_heads=8, group=4, unpacks=True) == 1


@pytest.mark.parametrize("block", [1, 12, 32])
@pytest.mark.parametrize("enough", [1, 1024])
def test_blocks_of_any_size_are_found(block, enough, monkeypatch):
    monkeypatch.setattr(decode, "ENOUGH", enough)
    attend_and_check([0, 11, 12, 70], heads=4, kv_heads=2, dim=16, value_dim=32, block=block)


def test_few_programs_look_further_ahead_than_many():
    assert decode._stages(1023, 8, unpacks=False) == 7
    assert decode._stages(1024, 8, unpacks=False) == 4
    assert decode._stages(1024, 16, unpacks=False) == 5
    assert decode._stages(1024, 8, unpacks=True) == 5


@pytest.mark.parametrize("dim", [64, 80])
def test_half_precision_is_within_its_rounding(dim):
    attend_and_check([39, 2], heads=4, kv_heads=4, dim=dim, value_dim=dim, dtype=HALF, tolerance=1e-2)


def test_queries_keys_and_values_may_be_parts_of_one_joined_matmul():
    """Their rows are not dense; only the last dimension is."""
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(3, 8 + 8, 24, generator=generator).to(DEVICE)
    parts = joined.split([8, 4, 4], dim=1)
    pool = torch.randn(20, 16, 4, 48, generator=generator).to(DEVICE)
    tables = torch.randperm(20, generator=generator)[:15].view(3, 5).int().to(DEVICE)
    places = torch.tensor([0, 15, 70]).to(DEVICE)
    pools = [pool.clone(), pool.clone()]
    options = AttentionOptions(scaling=0.3)
    want = decode.attend_decode(*(part.clone() for part in parts), pools[0], tables, places, options)
    got = decode.attend_decode(*parts, pools[1], tables, places, options)
    assert torch.equal(got, want)
    assert torch.equal(pools[1], pools[0])
