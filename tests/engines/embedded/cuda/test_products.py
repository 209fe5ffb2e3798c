import pytest
import torch
from torch.nn import functional

import tests.triton_device  # noqa: F401

from penstock.engines.embedded.cuda import products  # isort: skip
from penstock.engines.embedded.cuda.products import (  # isort: skip
    Choice,
    Choices,
    Epilogue,
    Size,
    product,
    sum_with_product,
)

CPU = torch.device("cpu")


class Doubles:
    """A product that can be told from torch's."""

    def __init__(self):
        self.calls = 0

    def run(self, algorithm, x, weight, out, *, bias=None, added=None):
        self.calls += 1
        out.copy_(2 * functional.linear(x, weight, bias) + (0 if added is None else added))


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setattr(products, "ALIGNMENT", 1)
    monkeypatch.setattr(Choices, "known", {})


def test_a_choice_serves_its_own_size_alone(monkeypatch):
    weight, x = torch.randn(6, 4), torch.randn(2, 3, 4)
    Choices.known[Size(CPU, torch.float32, 6, 6, 4, Epilogue.NONE)] = Choice(Doubles(), None)
    torch.testing.assert_close(product(x, weight, None), 2 * functional.linear(x, weight))
    torch.testing.assert_close(product(x[:1], weight, None), functional.linear(x[:1], weight))
    bias = torch.randn(6)
    torch.testing.assert_close(product(x, weight, bias), functional.linear(x, weight, bias))
    strided = torch.randn(4, 6).T
    torch.testing.assert_close(product(x, strided, None), functional.linear(x, strided))
    monkeypatch.setattr(products, "ALIGNMENT", 2**40)
    torch.testing.assert_close(product(x, weight, None), functional.linear(x, weight))


def test_a_sum_is_chosen_for_apart_from_the_product():
    weight, x, added = torch.randn(6, 4), torch.randn(3, 4), torch.randn(3, 6)
    plain = added + functional.linear(x, weight)
    Choices.known[Size(CPU, torch.float32, 3, 6, 4, Epilogue.NONE)] = Choice(Doubles(), None)
    torch.testing.assert_close(sum_with_product(added, x, weight), plain)
    Choices.known[Size(CPU, torch.float32, 3, 6, 4, Epilogue.SUM)] = Choice(Doubles(), None)
    torch.testing.assert_close(sum_with_product(added, x, weight), added + 2 * functional.linear(x, weight))
    torch.testing.assert_close(sum_with_product(added.T.contiguous().T, x, weight), plain)
