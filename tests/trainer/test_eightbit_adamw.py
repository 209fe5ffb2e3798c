import pytest
import torch

from penstock.trainer.config import TrainerConfig
from penstock.trainer.eightbit_adamw import MIN_VALUES, EightBitAdamW, _move
from penstock.trainer.eightbit_grid import SECOND_MOMENT


def parameter(count, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Parameter(torch.randn(count))


def test_first_update_is_exact_and_a_chunked_one_equal(monkeypatch):
    """The update reads moments before they are coded; 5,000 values fill no whole number of blocks."""
    ours, theirs = parameter(5000), parameter(5000)
    rule = EightBitAdamW([ours], TrainerConfig())
    plain = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    monkeypatch.setattr("penstock.trainer.eightbit_adamw.CHUNK_VALUES", 1024)
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
