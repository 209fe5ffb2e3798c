"""What a run is doing right now, for the terminal view and the watchdog."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A group on its way to the buffer."""

    stage: str
    since: float
    task: str


@dataclass(slots=True)
class Activity:
    """What the controller waits for."""

    trainer: str = "starting"
    num_generating: int = 0
    num_scoring: int = 0
    syncing_version: int | None = None
    under_way: dict[int, UnderWay] = field(default_factory=dict)
    """Groups on their way to the buffer, by number."""
    num_left: int = 0
    """Groups that have left a stage so far: generated, scored or dropped."""
