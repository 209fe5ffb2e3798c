import pytest
import torch

from tests.triton_device import DEVICE

from penstock.engines.embedded.cuda.kernels.low_rank import add_adapters, plan_shrink, tiles_of  # isort: skip


def expected(output, states, a, b, slots, scales, starts, rank):
    sums = output.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        narrow = states[row].float() @ a[slot - 1].float().T * scales[slot]
        for part in range(len(starts) - 1):
            start, stop = starts[part : part + 2]
            sums[row, start:stop] += b[slot - 1, start:stop].float() @ narrow[part * rank : (part + 1) * rank]
    return sums


def draw(rows, width, starts, rank, num_slots, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(DEVICE, dtype)

    parts = len(starts) - 1
    return {
        "output": normal(rows, starts[-1]),
        "states": normal(rows, width),
        "a": normal(num_slots, parts * rank, width) / width**0.5,
        "b": normal(num_slots, starts[-1], rank),
        "slots": torch.randint(0, num_slots + 1, (rows,), generator=generator, dtype=torch.int32).to(DEVICE),
        "scales": torch.rand(num_slots + 1, generator=generator).to(DEVICE),
    }


@pytest.mark.parametrize("rank", [1, 4, 16, 72])
@pytest.mark.parametrize(
    ("rows", "width", "starts"),
    [(1, 32, (0, 32)), (19, 48, (0, 40, 56, 72)), (33, 520, (0, 300)), (5, 40, (0, 129, 260))],
)
def test_rows_of_any_adapter_get_what_theirs_adds(rank, rows, width, starts):
    given = draw(rows, width, starts, rank, num_slots=3)
    wanted = expected(*given.values(), starts, rank)
    add_adapters(**given, tiles=tiles_of(starts, torch.device(DEVICE)))
    torch.testing.assert_close(given["output"], wanted, atol=1e-4, rtol=1e-4)


def test_rows_without_an_adapter_are_not_touched():
    given = draw(20, 32, (0, 48), 4, num_slots=2)
    given["slots"].zero_()
    given["slots"][7] = 2
    given["a"][0], given["b"][0] = torch.nan, torch.nan  # a slot that nobody has may hold anything
    before = given["output"].clone()
    wanted = expected(*given.values(), (0, 48), 4)
    add_adapters(**given, tiles=tiles_of((0, 48), torch.device(DEVICE)))
    others = [row for row in range(20) if row != 7]
    assert torch.equal(given["output"][others], before[others])
    torch.testing.assert_close(given["output"][7], wanted[7], atol=1e-4, rtol=1e-4)


def test_half_precision_rounds_only_what_travels():
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter multiplies no bfloat16
    given = draw(40, 256, (0, 64, 96), 8, num_slots=2, dtype=dtype)
    wanted = expected(*given.values(), (0, 64, 96), 8)
    add_adapters(**given, tiles=tiles_of((0, 64, 96), torch.device(DEVICE)))
    torch.testing.assert_close(given["output"].float(), wanted, atol=0.05, rtol=0.02)


def test_long_sums_of_few_rows_are_split_and_short_ones_are_not():
    assert plan_shrink(512, 1536).splits == 4
    assert plan_shrink(512, 8960).splits == 8
    assert plan_shrink(32768, 1536).splits == 1
    assert plan_shrink(1, 32).splits == 1
    for rows, width in ((512, 1536), (512, 8960), (7, 1000), (8192, 3584)):
        plan = plan_shrink(rows, width)
        assert plan.splits * plan.split >= width
        assert plan.split % plan.depth == 0
        assert (plan.splits - 1) * plan.split < width  # no split is empty


def test_tiles_do_not_cross_parts():
    tiles = tiles_of((0, 130, 140), torch.device("cpu"))
    assert tiles.bounds.tolist() == [[0, 130, 0], [128, 130, 0], [130, 140, 1]]
    assert not tiles.aligned
    assert tiles_of((0, 48, 64), torch.device("cpu")).aligned
