"""Where metrics go: one backend a file."""

import importlib.util
import sys
from pathlib import Path
from typing import Protocol

from penstock.errors import MissingExtraError
from penstock.observe.config import ObserveConfig
from penstock.observe.writers.metrics_jsonl import JsonlWriter


class MetricsWriter(Protocol):
    @property
    def name(self) -> str:
        """How its failures are reported."""

    def write(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


EXTRAS = ("tensorboard", "wandb", "trackio")
"""Settings that need the package of their name."""


def check_writers(config: ObserveConfig) -> None:
    """Refuse a setting whose package is missing, before a run has a folder."""
    for name in EXTRAS:
        if getattr(config, name) and not _is_there(name):
            raise MissingExtraError(f"observe.{name} needs {name}: pip install 'penstock[{name}]'")


def _is_there(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def make_writers(config: ObserveConfig, folder: Path, name: str) -> list[MetricsWriter]:
    """`metrics.jsonl` always, the others where asked for."""
    check_writers(config)
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
