"""Chooses the faults of a chaos run: which process, and what happens to it. It has no side effects."""

import random
from dataclasses import dataclass
from typing import Literal

What = Literal["kill", "freeze", "cut off", "kill and tear", "fill the disk of"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Names a fault and its process. `cut off` breaks the connection between a worker and the controller. `kill
    and tear` and `fill the disk of` are for the controller: the first also cuts some bytes off its journal,
    as a power loss does; the second leaves its files no room for some seconds."""

    what: What
    whom: str

    def __str__(self) -> str:
        return f"{self.what} {self.whom}"


CONTROLLER = "controller"
FAULTS: dict[Fault, int] = {
    Fault("kill", "engine0"): 3,
    Fault("kill", "trainer"): 3,
    Fault("kill", "scorer0"): 3,
    Fault("kill", "rollout0"): 3,
    Fault("freeze", "engine0"): 1,
    Fault("freeze", "trainer"): 1,
    Fault("freeze", "scorer0"): 1,
    Fault("freeze", "rollout0"): 1,
    Fault("cut off", "engine0"): 2,
    Fault("cut off", "trainer"): 2,
    Fault("cut off", "scorer0"): 2,
    Fault("cut off", "rollout0"): 2,
    Fault("fill the disk of", CONTROLLER): 2,
    Fault("kill", CONTROLLER): 2,
    Fault("kill and tear", CONTROLLER): 2,
}
"""Relative frequencies."""


def choose(rng: random.Random) -> Fault:
    return rng.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
