import pytest
import torch

from penstock.trainer.eightbit_grid import BLOCK, FIRST_MOMENT, SECOND_MOMENT, num_blocks

GRIDS = {"signed": FIRST_MOMENT, "unsigned": SECOND_MOMENT}


def spread(grid, blocks=64, octaves=12.0, seed=0):
    """Values over many sizes, of both signs where the grid has them."""
    torch.manual_seed(seed)
    values = torch.exp2(-torch.rand(blocks, BLOCK) * octaves) * 3e-5
    return values * torch.randn(blocks, BLOCK).sign() if grid.signed else values


def all_codes(grid):
    codes = torch.arange(-grid.top if grid.signed else 0, grid.top + 1).to(grid.dtype)
    return torch.cat([codes, codes.new_full((BLOCK - len(codes),), grid.top)])[None]


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_code_survives_a_round_trip(grid):
    codes, scales = all_codes(grid), torch.tensor([0.37])
    values = grid.decode(codes, scales)
    assert float(values.max()) == pytest.approx(0.37)
    assert values.unique().numel() == (255 if grid.signed else 256)
    again, scale = grid.encode(values, torch.full(values.shape, 0.5))
    assert torch.equal(again, codes)
    torch.testing.assert_close(scale, scales)


@pytest.mark.parametrize("noise", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_values_keep_their_sign_and_move_by_less_than_a_step(grid, noise):
    values = spread(grid)
    back = grid.decode(*grid.encode(values, torch.full(values.shape, noise)))
    assert torch.equal(back.sign(), values.sign())
    ratio = back / values
    assert float(ratio.max()) < 1.0925
    assert float(ratio.min()) > 1 / 1.0925


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_rounding_is_right_on_average(grid):
    values = spread(grid, blocks=1)
    torch.manual_seed(1)
    draws = [grid.decode(*grid.encode(values, torch.rand(values.shape))) for _ in range(2000)]
    torch.testing.assert_close(torch.stack(draws).mean(0), values, rtol=0.006, atol=0)


def test_small_values_fade_out_on_the_signed_grid_and_stay_on_the_unsigned():
    """Below the smallest code: the first moment rounds to zero or up, on average to itself; the second never
    to zero, since updates are divided by it."""
    values = torch.full((1, BLOCK), 1e-6)
    values[0, 0] = 1.0
    torch.manual_seed(0)
    draws = torch.stack(
        [FIRST_MOMENT.decode(*FIRST_MOMENT.encode(values, torch.rand(values.shape))) for _ in range(400)]
    )
    assert set(draws[:, 0, 1:].unique().tolist()) == {0.0, 2.0**-16}
    assert float(draws[:, 0, 1:].mean()) == pytest.approx(1e-6, rel=0.05)
    tiny = torch.full((1, BLOCK), 1e-20)
    tiny[0, 0], tiny[0, 1] = 1.0, 0.0
    back = SECOND_MOMENT.decode(*SECOND_MOMENT.encode(tiny, torch.zeros(tiny.shape)))
    assert back[0, :3].tolist() == [1.0, 0.0, 2.0**-32]


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_zeros_stay_zeros(grid):
    codes, scales = grid.encode(torch.zeros(2, BLOCK), torch.zeros(2, BLOCK))
    assert not codes.any()
    assert not grid.decode(codes, scales).any()


def test_blocks_cover_all_values():
    assert [num_blocks(count) for count in (1, 256, 257)] == [1, 1, 2]
