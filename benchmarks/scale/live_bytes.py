"""What the tensors of this process take, whoever holds them."""

import gc
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from penstock.trainer.parallel.local_shards import is_split, local_values


def live_bytes(parameters: Iterable[torch.Tensor], *others: Any) -> int:
    """Of all distinct storages: every tensor that Python knows, parameters with their gradients, and tensors in
    `others`. Gathered weights that were given back have an empty storage."""
    gc.collect()
    own = [tensor for parameter in parameters for tensor in (parameter, parameter.grad)]
    sizes: dict[int, int] = {}
    for tensor in (*_known(), *_tensors(own), *_tensors(others)):
        storage = local_values(tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _known() -> Iterator[torch.Tensor]:
    """DTensors have no storage of their own; the part that they wrap is a tensor too. Nor have fake tensors, which
    a compiler leaves behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked what they are
        for each in gc.get_objects():
            if not issubclass(type(each), torch.Tensor) or isinstance(each, FakeTensor | FunctionalTensor):
                continue
            if not is_split(each) and each.device.type != "meta":
                yield each


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
