"""Operators for tests of compiled and checkpointed layers: one that stands for a GPU's attention, and a count of those
that run."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@torch.library.custom_op("penstock_test::pretend_varlen", mutates_args=())
def _pretend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, longest_query: int, longest_key: int
) -> torch.Tensor:
    return query + longest_query + longest_key


@_pretend_varlen.register_fake
def _(query, key, value, longest_query, longest_key):
    return torch.empty_like(query)


def _gradients(ctx, grad):
    return grad.clone(), *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors), None, None


_pretend_varlen.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:3])
)


def pretend_varlen(query, key, value, _, __, longest_query, longest_key, **___):
    """Is called as FlashAttention's varlen operator, and does not attend."""
    return _pretend_varlen(query, key, value, longest_query, longest_key)


class Counting(TorchDispatchMode):
    """Counts the operators that really run, by name or by what `key` makes of name and arguments; None is not
    counted."""

    def __init__(self, key: Callable[[str, Any], Any] = lambda name, arguments: name) -> None:
        super().__init__()
        self._key = key
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        key = self._key(func.name().split(".")[0], args)
        if key is not None:
            self.counts[key] += 1
        return func(*args, **(kwargs or {}))
