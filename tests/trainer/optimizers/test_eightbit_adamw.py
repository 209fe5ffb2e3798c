import pytest
import torch

from penstock.trainer.config import TrainerConfig
from penstock.trainer.optimizers.eightbit_adamw import (
    BLOCK,
    FIRST_MOMENT,
    MIN_VALUES,
    SECOND_MOMENT,
    EightBitAdamW,
    _move,
    num_blocks,
)


def parameter(count, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Parameter(torch.randn(count))


def test_first_update_is_exact_and_a_chunked_one_equal(monkeypatch):
    """The update reads moments before they are coded; 5,000 values fill no whole number of blocks."""
    ours, theirs = parameter(5000), parameter(5000)
    rule = EightBitAdamW([ours], TrainerConfig())
    plain = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    monkeypatch.setattr("penstock.trainer.optimizers.eightbit_adamw.CHUNK_VALUES", 1024)
    ours.grad = torch.randn(5000)
    theirs.grad = ours.grad.clone()
    rule.step(0.01)
    plain.step()
    torch.testing.assert_close(ours, theirs)
    for _ in range(20):
        ours.grad = torch.randn(5000)
        theirs.grad = ours.grad.clone()
        rule.step(0.01)
        plain.step()
    # Gradients of pure noise are the worst case: nothing averages out.
    apart, moved = (ours - theirs).detach().abs().mean(), (theirs - parameter(5000)).detach().abs().mean()
    assert 0 < float(apart) < 0.05 * float(moved)


def second_moment(rule):
    (moments,) = rule._coded
    state = moments.state_dict()
    return SECOND_MOMENT.decode(state["second"], state["second_scale"])


def test_a_second_moment_fades_though_one_step_is_less_than_the_grid():
    """One value a block keeps the scale up; the others lose 0.1 % a step, a fiftieth of half a grid step."""
    master = torch.nn.Parameter(torch.zeros(16 * 256))
    rule = EightBitAdamW([master], TrainerConfig(betas=(0.9, 0.999)))
    loud = torch.zeros(16, 256)
    loud[:, 0] = 1.0
    master.grad = torch.ones(16 * 256)
    rule.step(0.0)
    master.grad = loud.flatten()
    for _ in range(500):
        rule.step(0.0)
    assert float(second_moment(rule)[:, 1:].mean()) == pytest.approx(1e-3 * 0.999**500, rel=0.03)


def test_bytes_a_value():
    master = parameter(1 << 16)
    (moments,) = EightBitAdamW([master], TrainerConfig())._coded
    tensors = [value for value in moments.state_dict().values() if isinstance(value, torch.Tensor)]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert stored / master.numel() == pytest.approx(2 + 2 * 4 / 256)


def test_small_tensors_keep_float32():
    rule = EightBitAdamW([parameter(MIN_VALUES - 1), parameter(MIN_VALUES)], TrainerConfig())
    assert len(rule._coded) == 1
    assert rule._rest is not None


def test_a_compiled_update_is_the_same():
    """Sizes and the number of the update change, and nothing is compiled for each of them."""
    results, graphs = [], []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    for compiled in (False, True):
        masters = [parameter(5000), parameter(6400, seed=1), parameter(9000, seed=2)]
        rule = EightBitAdamW(masters, TrainerConfig())
        if compiled:
            rule._move = torch.compile(_move, dynamic=True, backend=count)
        torch.manual_seed(3)
        for _ in range(4):
            for master in masters:
                master.grad = torch.randn_like(master)
            rule.step(0.01)
        results.append(torch.cat([master.detach() for master in masters]))
    assert torch.equal(*results)
    assert len(graphs) <= 3


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
