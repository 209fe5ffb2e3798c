"""Where metrics go: one backend a file."""

from pathlib import Path
from typing import Protocol

from penstock.observe.config import ObserveConfig
from penstock.observe.writers.jsonl import JsonlWriter


class MetricsWriter(Protocol):
    def write(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def make_writers(config: ObserveConfig, folder: Path, name: str) -> list[MetricsWriter]:
    """`metrics.jsonl` always, the others where asked for. A missing package is an error before the start."""
    writers: list[MetricsWriter] = []
    if config.tensorboard:
        from penstock.observe.writers.tensorboard import TensorBoardWriter

        writers.append(TensorBoardWriter(folder / "tensorboard"))
    if config.wandb:
        from penstock.observe.writers.wandb import WandbWriter

        writers.append(WandbWriter(config.project, name, folder))
    if config.trackio:
        from penstock.observe.writers.trackio import TrackioWriter

        writers.append(TrackioWriter(config.project, name))
    return [JsonlWriter(folder / "metrics.jsonl"), *writers]
