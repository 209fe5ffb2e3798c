import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.engines.embedded.tiny import make_model
from tests.models.kernels.device import DEVICE

from penstock.engines.embedded.cuda import cublas, products  # isort: skip
from penstock.engines.embedded.cuda.cublas import TILES, even_tiles  # isort: skip
from penstock.engines.embedded.cuda.products import (  # isort: skip
    ChosenLinear,
    Choice,
    Choices,
    choose_products,
    product,
    quickest,
)
from penstock.models.joined import join_projections  # isort: skip


CPU = torch.device("cpu")


def timers(*columns):
    """Each gives its times one after another."""
    return [iter(times).__next__ for times in columns]


def test_only_a_clear_winner_over_the_first_is_taken():
    rounds = products.ROUNDS
    assert quickest(timers([10.0] * rounds, [8.0] * rounds, [9.0] * rounds)) == 1
    assert quickest(timers([10.0] * rounds, [9.95] * rounds)) == 0
    assert (
        quickest(timers([10.0] * rounds, [30.0, *[7.0] * (rounds - 1)])) == 1
    )  # one slow turn is an accident
    assert quickest(timers([10.0] * rounds)) == 0


class Doubles:
    """A product that can be told from torch's."""

    def run(self, algorithm, x, weight, bias, out):
        out.copy_(2 * functional.linear(x, weight, bias))


def test_a_choice_serves_its_own_size_alone(monkeypatch):
    monkeypatch.setattr(products, "ALIGNMENT", 1)
    weight, x = torch.randn(6, 4), torch.randn(2, 3, 4)
    monkeypatch.setattr(Choices, "known", {(CPU, torch.float32, 6, 6, 4, False): Choice(Doubles(), None)})
    torch.testing.assert_close(product(x, weight, None), 2 * functional.linear(x, weight))
    torch.testing.assert_close(product(x[:1], weight, None), functional.linear(x[:1], weight))
    bias = torch.randn(6)
    torch.testing.assert_close(product(x, weight, bias), functional.linear(x, weight, bias))
    monkeypatch.setattr(products, "ALIGNMENT", 2**40)
    torch.testing.assert_close(product(x, weight, None), functional.linear(x, weight))
    monkeypatch.setattr(products, "ALIGNMENT", 1)
    strided = torch.randn(4, 6).T
    torch.testing.assert_close(product(x, strided, None), functional.linear(x, strided))


def test_families_and_linear_layers_are_switched_and_keep_their_numbers(monkeypatch):
    """With a trial that always finds something, as a GPU might."""
    model = make_model("qwen2")
    join_projections(model)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    before = model(ids).logits
    assert products._by_size(model) == {}  # 32 bits are left to torch
    monkeypatch.setattr(products, "TYPES", {torch.float32: 0})
    found = products._by_size(model)
    assert len(found) == 5  # qkv with a bias, output, gate and up, down, and the logits
    for sites in found.values():
        for site in sites:
            site.switch()
    assert isinstance(model.lm_head, ChosenLinear)
    assert model.model.layers[0].mlp.gate_proj.family.multiply is product
    torch.testing.assert_close(model(ids).logits, before)


def test_without_a_gpu_nothing_is_tried():
    assert choose_products(nn.Linear(8, 8, dtype=torch.bfloat16), [512], 8192) == 0


def test_tiles_that_divide_the_work_evenly():
    assert even_tiles(3584, 512, 132) == [(112, 128)]  # 128 tiles for 132 multiprocessors
    assert even_tiles(1536, 512, 132) == []
    assert (144, 256) in even_tiles(37888, 512, 132)  # 528 tiles: four rounds
    assert (256, 128) not in even_tiles(37888, 512, 132)  # 592: a fifth round for the last 64
    assert all(tile in TILES for tile in even_tiles(37888, 8192, 132))


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLASLt needs a GPU")
@pytest.mark.parametrize("bias", [False, True])
def test_every_algorithm_gives_the_product(bias, monkeypatch):
    from penstock.engines.embedded.cuda.cublas import Handle, Product, library

    handle = Handle(torch.device(DEVICE), library())
    made = Product(handle, rows=192, outer=768, inner=512, dtype=torch.bfloat16, bias=bias)
    x = torch.randn(192, 512, device=DEVICE).bfloat16()
    weight = torch.randn(768, 512, device=DEVICE).bfloat16()
    added = torch.randn(768, device=DEVICE).bfloat16() if bias else None
    want = functional.linear(x.double(), weight.double(), added.double() if bias else None)
    named = made.algorithms()
    assert named
    monkeypatch.setattr(cublas, "EVEN", 0)
    algorithms = [*named, *made.variations(named)]
    assert len(algorithms) > len(named)
    for algorithm in algorithms:
        out = torch.full((192, 768), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        made.run(algorithm, x, weight, added, out)
        assert float((out.double() - want).norm() / want.norm()) < 5e-3
