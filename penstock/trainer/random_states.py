"""Where a process's random numbers stand: taken out for a checkpoint, put back when a run goes on."""

from collections.abc import Mapping

import torch


def random_states(device: str) -> dict[str, torch.Tensor]:
    """Of the generators that a process has by default."""
    states = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(device: str, states: Mapping[str, torch.Tensor]) -> None:
    """A GPU's numbers go on where the state was of one too; elsewhere fresh ones are as random."""
    torch.set_rng_state(states["cpu"])
    if torch.device(device).type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
