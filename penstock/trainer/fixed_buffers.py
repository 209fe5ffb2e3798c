"""Checks that training changes no buffers, and no biases that correct a router's scores.

Some models move such a bias after each batch, to spread tokens over experts. That is refused here: replayed
experts do not follow the bias, and an update that holds only an adapter would not bring it to the engines.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from penstock.errors import UserError
from penstock.models.published import published_tensors
from penstock.trainer.parallel.local_shards import local_values

FIXED_PARAMETERS = "correction_bias"
"""The end of the names of parameters that act as buffers: a router's bias without gradient."""


class FixedBuffers:
    """Keeps copies of a model's persistent buffers and correction biases, as they were at the last `remember`."""

    def __init__(self, model: nn.Module) -> None:
        """`model` must already be on its training device and in its training dtype."""
        self._model = model
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name.endswith(FIXED_PARAMETERS) and not parameter.requires_grad
        }
        self.remember()

    def remember(self) -> None:
        """Take the present values as those that must not change."""
        self._before = {name: tensor.clone() for name, tensor in self._present().items()}

    def check(self) -> None:
        """Raise `UserError` if a value has changed since `remember`. This synchronises with the GPU once, so
        call it where the caller waits for the GPU anyway."""
        present = self._present()
        if _are_equal(present, self._before):
            return
        for name, tensor in present.items():
            if not _are_equal({name: tensor}, self._before):
                raise UserError(
                    f"{name} of {type(self._model).__name__} must not change while it is trained, and something "
                    "has changed it; turn off what moves it (a bias that balances experts)"
                )

    def _present(self) -> dict[str, torch.Tensor]:
        """Return the present values; of parameters that are split over ranks, this rank's part."""
        known = {id(parameter) for parameter in self._model.parameters()}
        buffers = {
            name: tensor for name, tensor in published_tensors(self._model).items() if id(tensor) not in known
        }
        return {name: local_values(each).detach() for name, each in {**buffers, **self._parameters}.items()}


def _are_equal(present: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> bool:
    """Compare all tensors, concatenated by dtype and device, so that the biases of all layers need one
    comparison."""
    pairs: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for name, now in present.items():
        then = before.get(name)
        if then is None or (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
            return False
        pairs[now.dtype, now.device].append((now.flatten(), then.flatten()))
    joined = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in pairs.values()]
    same = [torch.isclose(now, then, rtol=0, atol=0, equal_nan=True).all() for now, then in joined]
    return all(bool(each) for each in same)
