"""What a run amounts to: `summary.json`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Idle is the share of the training phase in which a process did none of its work: no forward,
    backward or optimizer work for the trainer, no decoding for the engines (their mean)."""

    name: str
    folder: str
    steps: int
    samples: int
    wall_s: float
    training_s: float
    heldout_reward_start: float | None
    heldout_reward_end: float | None
    train_reward_end: float | None
    trainer_idle: float
    engine_idle: float
    tokens: int
    tokens_per_s: float
    staleness_mean: float
    staleness_max: float
    sync_stall_s: float
    """Of an update, as its median: the time in which no forward pass could run. The first versions may take
    longer, since an engine then opens what it will read from."""
    sync_stall_max_s: float
    drops: dict[str, int]
    stopped_early: bool

    def write(self, folder: Path) -> None:
        (folder / "summary.json").write_text(json.dumps(asdict(self), indent=2) + "\n")
