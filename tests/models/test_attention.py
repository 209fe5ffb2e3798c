import pytest
import torch
from torch import nn

from penstock.models.attention import attach, dispatch

UNPASSED = object()


class Layer(nn.Module):
    layer_idx = 0
    sliding_window = 7


@pytest.mark.parametrize(("passed", "window"), [(UNPASSED, 7), (None, None), (3, 3)])
def test_a_window_that_is_passed_counts_more_than_the_modules(passed, window):
    """EXAONE-4 passes None for layers that see everything, although every module has a window."""
    seen = []
    layer = Layer()
    attach(layer, lambda module, query, key, value, options: seen.append(options) or query)
    row = torch.zeros(1, 2, 3, 4)
    dispatch(layer, row, row, row, None, **({} if passed is UNPASSED else {"sliding_window": passed}))
    assert seen[0].sliding_window == window
