"""Serves adapters beside the weights: several policies in one batch, each with its own matrices.

    open ─► an idle slot is filled and verified, while the engine generates ─► settle: the policy moves to that slot

Every policy is served from a slot of its own, and there is one more. So an update is never written over what is
served: it is complete and verified before a token is computed with it. If it fails, nothing has changed.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from penstock.engines.embedded.adapters.adapted_linear import attach_stack, find_sites, find_targets
from penstock.engines.embedded.adapters.adapter_serving import Place
from penstock.engines.embedded.adapters.adapter_stack import AdapterStack
from penstock.engines.embedded.adapters.adapter_tensors import Target, largest_rank
from penstock.engines.embedded.adapters.row_slots import NO_ADAPTER, RowSlots
from penstock.engines.embedded.config import SPARE_SLOTS
from penstock.errors import PenstockError
from penstock.records import TensorSpec, WeightUpdate


class UnmergedAdapters:
    """Serves at most `max_adapters` policies. Stacks are made when the first adapter arrives, which says what it
    acts on."""

    is_quick = True

    def __init__(self, model: nn.Module, rows: RowSlots, *, max_adapters: int, max_rank: int) -> None:
        self._model = model
        self._rows = rows
        self._max_adapters = max_adapters
        self._max_rank = max_rank
        self._stacks: dict[str, tuple[AdapterStack, int]] = {}
        """For each layer, the stack of its matmul and its part in that stack."""
        self._rank = 0
        self._free = list(range(1, max_adapters + SPARE_SLOTS + 1))
        self._slot_of: dict[str, int] = {}
        self._places: dict[int, tuple[dict[str, Target], Place]] = {}
        """The layers that each slot was last filled for, and its tensors."""
        self._read: tuple[tuple[TensorSpec, ...], dict[str, Target]] = (), {}
        """The tensors of the last update and their layers. The next update has the same ones, and reading
        hundreds of names takes long."""

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(self._slot_of)

    def check(self, update: WeightUpdate) -> None:
        if update.policy not in self._slot_of and len(self._slot_of) >= self._max_adapters:
            served = ", ".join(map(repr, self._slot_of)) or "none"
            raise PenstockError(
                f"policy {update.policy!r} would be adapter {len(self._slot_of) + 1}, and "
                f"engine.embedded.max_adapters={self._max_adapters} (served: {served}); raise it"
            )
        rank = largest_rank(self._targets(update).values())
        if rank > self._max_rank:
            raise PenstockError(
                f"the adapter of policy {update.policy!r} has rank {rank}, and "
                f"engine.embedded.max_adapter_rank={self._max_rank}; raise it"
            )

    def has_room(self, update: WeightUpdate) -> bool:
        targets = self._targets(update)
        return self._rank >= largest_rank(targets.values()) and all(
            layer in self._stacks for layer in targets
        )

    def make_room(self, update: WeightUpdate) -> None:
        targets = self._targets(update)
        self.expect(targets, largest_rank(targets.values()))

    def expect(self, layers: Iterable[str], rank: int) -> None:
        """Make new stacks that have room for adapters of these layers and this rank too. The slots keep what
        they hold."""
        self._rank = max(self._rank, rank)
        held = {slot: targets for slot, (targets, _) in self._places.items()}
        old, self._stacks = self._stacks, {}
        for site in find_sites(self._model, [*old, *layers]):
            stack = AdapterStack.make(
                list(site.values()),
                num_slots=self._max_adapters + SPARE_SLOTS,
                rank=self._rank,
                rows=self._rows,
            )
            attach_stack(site, stack)
            self._stacks |= {name: (stack, part) for part, name in enumerate(site)}
        with torch.no_grad():
            for slot, known in held.items():
                before = self._places[slot][1].tensors
                place = self._place(slot, known)
                for name, tensor in place.tensors.items():
                    tensor.copy_(before[name])

    def open(self, update: WeightUpdate) -> Place:
        targets = self._targets(update)
        slot = self._free.pop(0)
        assert update.adapter is not None
        self._rows.scale(slot, update.adapter.scale)
        known = self._places.get(slot)
        if known is not None and known[0] == targets:
            return known[1]
        for stack in {id(stack): stack for stack, _ in self._stacks.values()}.values():
            stack.clear(slot)
        return self._place(slot, targets)

    def settle(self, update: WeightUpdate, place: Place) -> None:
        self._rows.assign(update.policy, place.slot)
        self._release(update.policy)
        self._slot_of[update.policy] = place.slot

    def abandon(self, place: Place) -> None:
        if place.slot not in self._slot_of.values():
            self._places.pop(place.slot, None)  # it may be half written
            self._free.append(place.slot)

    def take_off(self, policy: str) -> None:
        self._rows.assign(policy, NO_ADAPTER)
        self._release(policy)

    def live_tensors(self, policy: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors that a policy is served with."""
        return self._places[self._slot_of[policy]][1].tensors

    def _targets(self, update: WeightUpdate) -> dict[str, Target]:
        if self._read[0] != update.tensors:
            self._read = update.tensors, find_targets(self._model, update)
        return self._read[1]

    def _release(self, policy: str) -> None:
        slot = self._slot_of.pop(policy, None)
        if slot is not None:
            self._free.append(slot)

    def _place(self, slot: int, targets: dict[str, Target]) -> Place:
        tensors = {}
        for layer, target in targets.items():
            stack, part = self._stacks[layer]
            tensors[target.a], tensors[target.b] = stack.matrices(slot, part, target.rank)
        place = Place(slot, tensors)
        self._places[slot] = targets, place
        return place
