"""What training must leave as it is beside the weights: buffers, and biases that correct a router's scores.

Some models move such a bias after each batch, to spread tokens over experts. Here that is refused: replayed experts
do not follow it, and an update that holds an adapter alone would leave it behind in the engines.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from penstock.errors import UserError
from penstock.models.published import published_tensors
from penstock.trainer.parallel.local_shards import local_values

FIXED_PARAMETERS = "correction_bias"
"""How the names of parameters end that are buffers in all but their class: a router's bias without gradient."""


class FixedBuffers:
    """Copies of the persistent buffers and correction biases of a model, as they were when training began."""

    def __init__(self, model: nn.Module) -> None:
        """The model is where it trains, in the number format in which it trains."""
        self._model = model
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name.endswith(FIXED_PARAMETERS) and not parameter.requires_grad
        }
        self.remember()

    def remember(self) -> None:
        """Keep the present values as those that must stay."""
        self._before = {name: tensor.clone() for name, tensor in self._present().items()}

    def check(self) -> None:
        """Raise `UserError` where a value has changed. This waits for the GPU once, so call it where that is
        waited for anyway."""
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
        """Their present values; of parameters that are split over ranks, this rank's part."""
        known = {id(parameter) for parameter in self._model.parameters()}
        buffers = {
            name: tensor for name, tensor in published_tensors(self._model).items() if id(tensor) not in known
        }
        return {name: local_values(each).detach() for name, each in {**buffers, **self._parameters}.items()}


def _are_equal(present: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> bool:
    """Joined by number format and device: one comparison for the biases of all layers."""
    pairs: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for name, now in present.items():
        then = before.get(name)
        if then is None or (now.shape, now.dtype, now.device) != (then.shape, then.dtype, then.device):
            return False
        pairs[now.dtype, now.device].append((now.flatten(), then.flatten()))
    joined = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in pairs.values()]
    same = [torch.isclose(now, then, rtol=0, atol=0, equal_nan=True).all() for now, then in joined]
    return all(bool(each) for each in same)
