"""Buffers that training must leave as they are, such as a router's correction bias.

Some models move such a bias after each batch, to spread tokens over experts. Here that is refused: replayed experts
do not follow it, and an update that holds an adapter alone would leave it behind in the engines.
"""

import torch
from torch import nn

from penstock.errors import UserError
from penstock.models.published import published_tensors


class FixedBuffers:
    """Remembers the persistent buffers of a model. Parameters are the optimizer's business."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, tuple[torch.Tensor, int]] = {}

    def remember(self) -> None:
        """What the buffers are from here on."""
        self._before = {name: (tensor, tensor._version) for name, tensor in self._buffers().items()}

    def check(self) -> None:
        """Refuse a buffer that was written or replaced since. Nothing is read: a GPU need not be waited for."""
        for name, tensor in self._buffers().items():
            known, version = self._before.get(name, (None, 0))
            if tensor is not known or tensor._version != version:
                raise UserError(
                    f"{name} of {type(self._model).__name__} must not change while it is trained, and a forward "
                    "pass has changed it; turn off what moves it (a bias that balances experts) in the model"
                )

    def _buffers(self) -> dict[str, torch.Tensor]:
        parameters = {id(parameter) for parameter in self._model.parameters()}
        tensors = published_tensors(self._model)
        return {name: tensor for name, tensor in tensors.items() if id(tensor) not in parameters}
