"""Fingerprints what vLLM's layers hold after a load, before a layer packs its weights for its kernels.

vLLM joins projections (`qkv_proj` is q, k and v), pads vocabularies, and on a CPU packs matrices and frees
the originals. So each layer is read after its weights were loaded and before they are packed:

    q, k, v ─► layer.weight (joined) ─► verified: rows of q, of k, of v ─► packed
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.sync.fingerprint import fingerprint

EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
"""vLLM's names for the weights of all experts, and those of transformers."""
PACKING, PROCESS = "quant_method", "process_weights_after_loading"
"""The attribute of a vLLM layer that holds its quantization method, and the function of that method that packs
the weights."""
WRAPPED = (".base_layer", ".routed_experts")
"""What vLLM inserts between a layer's name and its tensors."""


class LoadVerifier:
    """Fingerprints what `model` holds. `shapes` are those of the loaded tensors, by the trainer's names."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        self._shapes = shapes
        self._packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        self.found: dict[str, int] = {}
        """Fingerprints of live values, by the trainer's names."""
        self.packed: set[int] = set()
        """Layers that have packed their weights since, by `id`."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Fingerprint layers while the block loads weights. Layers that pack their weights are read just before
        they do, all others when the block has ended."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        methods: dict[int, Any] = {}
        packed: set[int] = set()
        for module in self._model.modules():
            method = getattr(module, PACKING, None)
            if hasattr(method, PROCESS):
                packed.add(id(module))
                methods[id(method)] = method

        def look_first(process: Callable[[nn.Module], None], layer: nn.Module) -> None:
            self._see(paths[id(layer)], layer)
            self.packed.add(id(layer))
            process(layer)

        for method in methods.values():
            setattr(method, PROCESS, partial(look_first, getattr(method, PROCESS)))
        try:
            yield
        finally:
            for method in methods.values():
                delattr(method, PROCESS)
        for path, module in self._model.named_modules():
            if id(module) not in packed:
                self._see(path, module)

    def _see(self, path: str, layer: nn.Module) -> None:
        tensors = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        for name, tensor in tensors:
            self._see_tensor(path, name, tensor)

    def _see_tensor(self, path: str, name: str, tensor: torch.Tensor) -> None:
        for wrapped in WRAPPED:
            path = path.removesuffix(wrapped)
        row = 0
        for source in self._sources(path, name):
            shape = self._shapes.get(source)
            if shape is None or tensor.ndim != len(shape):
                return
            values = tensor if tuple(tensor.shape) == shape else tensor[row : row + shape[0]]
            if tuple(values.shape) != shape:
                return
            row += shape[0] if shape else 0
            self.found[source] = fingerprint(values)

    def _sources(self, path: str, name: str) -> list[str]:
        """Return the trainer's names for the tensors that lie in one tensor of vLLM, from top to bottom."""
        stem, _, last = path.rpartition(".")
        if name in EXPERTS:
            return [f"{path}.{EXPERTS[name]}"]
        parts = self._packed.get(last, (last,))
        return [".".join(filter(None, (stem, each, name))) for each in parts]
