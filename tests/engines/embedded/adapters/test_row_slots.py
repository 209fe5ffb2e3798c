import numpy as np
import pytest
import torch
from torch import nn

from penstock.engines.embedded.adapters.adapter_stack import AdapterStack
from penstock.engines.embedded.adapters.row_slots import NO_ADAPTER, HostSlots
from penstock.errors import PenstockError


def make_stack(rows: HostSlots, seed: int = 0) -> AdapterStack:
    """Two projections of 6 and 3 outputs, three slots of rank 2, filled at random."""
    stack = AdapterStack.make([nn.Linear(5, 6), nn.Linear(5, 3)], num_slots=3, rank=2, rows=rows)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (stack.a, stack.b):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return stack


def added(stack: AdapterStack, states: torch.Tensor, slot: int, scale: float) -> torch.Tensor:
    parts = []
    for part in range(2):
        a, b = stack.matrices(slot, part, 2)
        parts.append(scale * states @ a.T @ b.T)
    return torch.cat(parts, dim=-1)


def test_every_row_gets_its_own_adapter_and_others_none() -> None:
    rows = HostSlots(torch.device("cpu"))
    stack = make_stack(rows)
    rows.scale(1, 0.5)
    rows.scale(3, 2.0)
    rows.assign("a", 3)
    rows.assign("b", 1)
    rows.begin(["b", "none", "a"], np.array([0, 0, 2, 1, 0]))
    states, weight = torch.randn(1, 5, 5), torch.randn(9, 5)
    with torch.no_grad():
        plain = states @ weight.T
        found = stack.linear(states, weight, None) - plain
        expected = torch.stack(
            [added(stack, states[0, at], slot, scale) for at, (slot, scale) in enumerate(
                [(1, 0.5), (1, 0.5), (3, 2.0), (1, 0.0), (1, 0.5)]
            )]
        )  # fmt: skip
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


def test_a_policy_without_an_adapter_is_the_weights() -> None:
    rows = HostSlots(torch.device("cpu"))
    stack = make_stack(rows)
    rows.scale(1, 1.0)
    rows.assign("a", 1)
    rows.assign("a", NO_ADAPTER)
    rows.begin(["a"], np.zeros(4, dtype=np.int64))
    states, weight = torch.randn(1, 4, 5), torch.randn(9, 5)
    with torch.no_grad():
        assert torch.equal(stack.linear(states, weight, None), nn.functional.linear(states, weight))


def test_one_part_alone() -> None:
    rows = HostSlots(torch.device("cpu"))
    stack = make_stack(rows)
    rows.scale(2, 1.0)
    rows.assign("a", 2)
    rows.begin(["a"], np.zeros(4, dtype=np.int64))
    states = torch.randn(1, 4, 5)
    with torch.no_grad():
        found = stack.part(1).linear(states, torch.zeros(3, 5), None)
        torch.testing.assert_close(found, added(stack, states, 2, 1.0)[..., 6:])


def test_layers_that_see_only_some_tokens_are_refused() -> None:
    rows = HostSlots(torch.device("cpu"))
    stack = make_stack(rows)
    rows.scale(1, 1.0)
    rows.assign("a", 1)
    rows.begin(["a"], np.zeros(4, dtype=np.int64))
    with pytest.raises(PenstockError, match="every token of a pass, got 3 of 4"):
        stack.linear(torch.randn(1, 3, 5), torch.randn(9, 5), None)
