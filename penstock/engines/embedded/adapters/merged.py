"""Merges one adapter into the weights: as fast as the base, for one policy. DoRA is served only this way.

The formula is in `models.adapter_merge`. The weights that an adapter acts on are kept as they were, since
every update starts from them.
"""

import torch
from torch import nn

from penstock.engines.embedded.adapters.adapted_linear import find_layer, find_targets
from penstock.engines.embedded.adapters.adapter_serving import Place
from penstock.engines.embedded.adapters.adapter_tensors import Target, targets_of
from penstock.errors import PenstockError
from penstock.models.adapter_merge import merged_weight
from penstock.records import AdapterSpec, WeightUpdate


class MergedAdapter:
    """Serves at most one adapter. An update is kept beside the weights, verified, and merged between two passes."""

    is_quick = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._policy: str | None = None
        self._base: dict[str, torch.Tensor] = {}
        """The weights below the adapter, by layer, as long as there is one."""
        self._place: Place | None = None

    @property
    def policies(self) -> tuple[str, ...]:
        return () if self._policy is None else (self._policy,)

    def check(self, update: WeightUpdate) -> None:
        for layer, target in find_targets(self._model, update, merged=True).items():
            if update.adapter is not None and update.adapter.dora != bool(target.magnitude):
                raise PenstockError(
                    f"DoRA needs lora_magnitude_vector for {layer}, and LoRA has none; got {target}"
                )

    def has_room(self, update: WeightUpdate) -> bool:
        return True

    def make_room(self, update: WeightUpdate) -> None:
        pass

    def open(self, update: WeightUpdate) -> Place:
        """Return the tensors to load into, the same for every update of one shape: nothing is computed with them
        before they are merged."""
        shapes = {spec.name: spec.shape for spec in update.tensors}
        device = next(self._model.parameters()).device
        known = self._place
        if known is not None and {name: tuple(t.shape) for name, t in known.tensors.items()} == shapes:
            return known
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in update.tensors}
        tensors = {
            name: torch.zeros(shape, dtype=dtypes[name], device=device) for name, shape in shapes.items()
        }
        self._place = Place(1, tensors)
        return self._place

    @torch.no_grad()
    def settle(self, update: WeightUpdate, place: Place) -> None:
        assert update.adapter is not None
        targets = targets_of(update)
        self._policy = update.policy  # set before a merge can fail half-way: `take_off` undoes it
        for layer in self._base.keys() - targets.keys():
            find_layer(self._model, layer, merged=True).weight.copy_(self._base.pop(layer))
        for layer, target in targets.items():
            weight = find_layer(self._model, layer, merged=True).weight
            base = self._base.setdefault(layer, weight.detach().clone())
            weight.copy_(merge(base, update.adapter, target, place))

    def abandon(self, place: Place) -> None:
        pass

    @torch.no_grad()
    def take_off(self, policy: str) -> None:
        if policy == self._policy:
            for layer, base in self._base.items():
                find_layer(self._model, layer, merged=True).weight.copy_(base)
            self._base, self._policy = {}, None


def merge(base: torch.Tensor, spec: AdapterSpec, target: Target, place: Place) -> torch.Tensor:
    """Return the weights of one layer with the adapter merged in, as float32."""
    magnitude = place.tensors[target.magnitude] if target.magnitude else None
    return merged_weight(base, place.tensors[target.a], place.tensors[target.b], spec, magnitude)
