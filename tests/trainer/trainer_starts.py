"""What a trainer's worker is started with."""

from typing import Any

from penstock.trainer.trainer_start import TrainerStart


def make_start(**changes: Any) -> TrainerStart:
    """A start with nothing in it, and these changes."""
    fields: dict[str, Any] = {
        "model": "m",
        "device": "cpu",
        "threads": 1,
        "total_steps": 1,
        "seed": 0,
        "folder": "",
        "sync": {},
        "wire_dtype": "float32",
        "trainer": {},
        "algorithm": {},
    }
    return TrainerStart(**(fields | changes))
