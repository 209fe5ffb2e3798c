"""All that a checkpoint holds of a trainer, as it was at one moment; its random numbers go on from there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.trainer.checkpoint.host_copies import Copies, HostCopier
from penstock.trainer.checkpoint.state_files import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Tensors are copies in host memory, or the live ones where the host had no room for copies."""

    plain: Any
    """The trainer's state without its tensors (`state_files.flatten`)."""
    tensors: Sequence[torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    """Of the model, or of the adapter, as they are saved."""
    copies: Copies | None
    """None: the tensors are live."""

    @property
    def is_live(self) -> bool:
        return self.copies is None

    def wait(self) -> None:
        """Wait until its copies are made."""
        if self.copies is not None:
            self.copies.wait()


def take_state(
    copier: HostCopier, state: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> CheckpointState:
    """Queue the copies of a state and of the weights."""
    plain, tensors = flatten(state)
    copies = copier.start([*tensors, *weights.values()])
    if copies is None:
        return CheckpointState(plain=plain, tensors=tensors, weights=weights, copies=None)
    return CheckpointState(
        plain=plain,
        tensors=copies.tensors[: len(tensors)],
        weights=dict(zip(weights, copies.tensors[len(tensors) :], strict=True)),
        copies=copies,
    )


def random_states(device: str) -> dict[str, torch.Tensor]:
    """The states of the generators that a process has by default."""
    states = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(device: str, states: Mapping[str, torch.Tensor]) -> None:
    """A GPU's numbers go on where the state was of one too; elsewhere fresh ones are as random."""
    torch.set_rng_state(states["cpu"])
    if torch.device(device).type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
