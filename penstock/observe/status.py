"""A run at one moment, as the views show it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process: how much of the last moments it worked, and what it does or waits for now."""

    name: str
    busy: float
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    name: str
    phase: str
    elapsed_s: float
    step: int
    steps: int
    reward: float | None
    rewards: tuple[float, ...]
    heldout: tuple[tuple[int, float], ...]
    """(step, mean held-out reward) of every evaluation so far."""
    tokens_per_s: float
    staleness_mean: float
    staleness_max: float
    samples: int
    drops: dict[str, int] = field(default_factory=dict)
    processes: tuple[ProcessStatus, ...] = ()
