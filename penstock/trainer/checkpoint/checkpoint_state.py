"""Captures everything that a checkpoint holds of a trainer at one moment, including its random number
generators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.trainer.checkpoint.host_copies import Copies, HostCopier
from penstock.trainer.checkpoint.state_files import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Holds a trainer's state. Its tensors are copies in host memory, or the trainer's own if the host had no room
    for copies."""

    plain: Any
    """The trainer's state without its tensors (`state_files.flatten`)."""
    tensors: Sequence[torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    """The weights of the model, or of the adapter, as they are saved."""
    copies: Copies | None
    """None if the tensors are live."""

    @property
    def is_live(self) -> bool:
        return self.copies is None

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self.copies is not None:
            self.copies.wait()


def take_state(
    copier: HostCopier, state: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> CheckpointState:
    """Queue copies of a state and of the weights. If the host has no room for them, hold the tensors themselves."""
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
    """Return the states of the process's default random number generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(device: str, states: Mapping[str, torch.Tensor]) -> None:
    """Restore the generators. A GPU's generator is restored only if the checkpoint has a GPU state; otherwise
    its fresh state is as good."""
    torch.set_rng_state(states["cpu"])
    if torch.device(device).type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
