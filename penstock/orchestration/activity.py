"""What a run is doing right now, for the terminal view and the watchdog."""

from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """What the controller waits for."""

    trainer: str = "starting"
    num_generating: int = 0
    num_scoring: int = 0
    syncing_version: int | None = None
