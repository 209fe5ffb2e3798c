"""Makes the metric writers that a config asks for, one backend a file."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.errors import MissingExtraError
from penstock.observe.config import ObserveConfig
from penstock.observe.writers.metrics_jsonl import JsonlWriter
from penstock.observe.writers.sample_rows import Row


class MetricsWriter(Protocol):
    @property
    def name(self) -> str:
        """Return the name under which failures of the writer are reported."""

    def write(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class SampleWriter(Protocol):
    """Writes answers too, as a table."""

    def write_samples(self, step: int, rows: Sequence[Row]) -> None: ...


@runtime_checkable
class UndoingWriter(Protocol):
    """Keeps each step once: `undo_past` removes the rows of later steps, which are trained again."""

    def undo_past(self, step: int) -> None: ...


@runtime_checkable
class Tracker(Protocol):
    """Logs metrics to a tracker, which finds a resumed run by its `run_id`."""

    @property
    def name(self) -> str: ...

    @property
    def run_id(self) -> str: ...


EXTRAS = ("tensorboard", "wandb", "trackio")
"""Settings that need the package of the same name."""


def check_writers(config: ObserveConfig) -> None:
    """Refuse a setting whose package is missing, before the run has a folder."""
    for name in EXTRAS:
        if getattr(config, name) and not _is_there(name):
            raise MissingExtraError(f"observe.{name} needs {name}: pip install 'penstock[{name}]'")


def _is_there(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def make_writers(
    config: ObserveConfig, folder: Path, name: str, known: Mapping[str, str] | None = None
) -> list[MetricsWriter]:
    """Make the writer of `metrics.jsonl` and those that the config asks for. `known` maps a tracker's name to
    the id under which it already has this run."""
    known = known or {}
    check_writers(config)
    writers: list[MetricsWriter] = []
    if config.tensorboard:
        from penstock.observe.writers.tensorboard import TensorBoardWriter

        writers.append(TensorBoardWriter(folder / "tensorboard"))
    if config.wandb:
        from penstock.observe.writers.wandb import WandbWriter

        writers.append(WandbWriter(config.project, name, folder, known.get("wandb")))
    if config.trackio:
        from penstock.observe.writers.trackio import TrackioWriter

        writers.append(TrackioWriter(config.project, name, known.get("trackio")))
    return [JsonlWriter(folder / "metrics.jsonl"), *writers]
