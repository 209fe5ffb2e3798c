"""Selects the adapter of each row on a GPU; the device looks it up itself at the beginning of a pass.

The host launches ahead, and an update takes effect between two steps that are already queued (`weight_swap.py`). So
rows carry the number of their policy, and a small table says which slot that policy is served from. Moving a policy
to another slot means writing one number of the table.

As for attention, compiled code must serve all layers and all engines, so the operator's arguments are what a layer
knows. The matrices `a` carry the rows of the pass as an attribute, `b` the tiles of the outputs.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from penstock.engines.embedded.adapters.row_slots import NO_ADAPTER
from penstock.engines.embedded.cuda.kernels.low_rank import add_adapters, tiles_of
from penstock.engines.embedded.cuda.weight_swap import Gate
from penstock.errors import PenstockError
from penstock.models.transfer import upload

if TYPE_CHECKING:
    from penstock.engines.embedded.adapters.adapter_stack import AdapterStack


class DeviceSlots:
    """Holds the slots of one engine's policies, and of the rows of its pass."""

    def __init__(self, gate: Gate, *, max_rows: int, num_slots: int, device: torch.device) -> None:
        self._gate = gate
        self._device = device
        self._slot_of = torch.zeros(len(gate.versions), dtype=torch.int32, device=device)
        """The slot of each policy, by the policy's number."""
        for number in range(len(self._slot_of)):
            # Loads the kernels that `assign` needs while the GPU is paused.
            self._slot_of[number].fill_(NO_ADAPTER)
        self.scales = torch.zeros(num_slots + 1, dtype=torch.float32, device=device)
        self._decoding = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.rows: torch.Tensor | None = None
        """The slot of each row of the pass, once there are adapters."""
        self._is_used = False
        self._moved: Any = None

    def adopt(self, stack: "AdapterStack") -> None:
        self._is_used = True
        stack.a._penstock_slots = self  # type: ignore[attr-defined]
        stack.b._penstock_tiles = tiles_of(stack.starts, self._device)  # type: ignore[attr-defined]
        for fixed in (stack.a, stack.b):
            torch._dynamo.mark_static(fixed)  # parameters are static too

    def scale(self, slot: int, scale: float) -> None:
        self.scales[slot].fill_(scale)

    def assign(self, policy: str, slot: int) -> None:
        self._slot_of[self._gate.number(policy)].fill_(slot)
        if self._device.type == "cuda":
            self._moved = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._moved.record(torch.cuda.current_stream(self._device))

    def beside(self, *, in_order: bool) -> AbstractContextManager[None]:
        """Queue this block's work beside the passes, after those that may still use a slot given up by a policy."""
        return self._gate.beside(self._moved, in_order=in_order)

    def begin_decode(self, policies: torch.Tensor) -> None:
        """Look up the slots of a decode step, whose rows have these policies. This is part of its graph."""
        if self._is_used:
            self.rows = self._decoding[: len(policies)]
            torch.index_select(self._slot_of, 0, policies, out=self.rows)

    def begin_prompts(self, policies: list[str], owners: npt.NDArray[np.int64]) -> None:
        """Look up the slots of a pass over prompts: `policies` has the policy of each span, `owners` the span of
        each token."""
        if self._is_used:
            numbers = np.array([self._gate.number(policy) for policy in policies])
            self.rows = self._slot_of[upload(numbers[owners], self._device)]

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stack: "AdapterStack"
    ) -> torch.Tensor:
        output: torch.Tensor = adapted_linear(input, weight, bias, stack.a, stack.b)
        return output


@torch.library.custom_op("penstock::adapted_linear", mutates_args=())
def adapted_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Compute a linear layer and add the adapters of the rows. Both are one operator, because the adapters are
    added in place."""
    output = functional.linear(input, weight, bias)
    slots: DeviceSlots = a._penstock_slots  # type: ignore[attr-defined]
    states = input.flatten(0, -2)
    if slots.rows is None or len(slots.rows) != len(states):
        raise PenstockError(
            f"an adapter can act on layers that see every token of a pass, got {len(states)} rows; train it "
            "without the layers of single experts"
        )
    add_adapters(
        output.flatten(0, -2),
        states,
        a,
        b,
        slots=slots.rows,
        scales=slots.scales,
        tiles=b._penstock_tiles,  # type: ignore[attr-defined]
    )
    return output


@adapted_linear.register_fake
def _(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])
