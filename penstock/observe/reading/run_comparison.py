"""Runs beside each other: how their configs differ, and what each answered to the same prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.sample_table import Rows


class Unset:
    """A setting that a run of another version does not have."""

    def __repr__(self) -> str:
        return "–"


UNSET = Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting by its dotted name, and its value in each run."""

    name: str
    values: tuple[Any, ...]


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Settings that are not the same in all of them, by name."""
    flat = [dict(_flat(config)) for config in configs]
    names = sorted({name for one in flat for name in one})
    rows = [Difference(name=name, values=tuple(one.get(name, UNSET) for one in flat)) for name in names]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def same_task(runs: Sequence[RunReading], task_id: str) -> list[Rows]:
    """The rows of each run's answers to a task, oldest first."""
    return [run.samples.select(task=task_id) for run in runs]


def shared_tasks(runs: Sequence[RunReading], limit: int = 1000) -> list[str]:
    """Tasks that every run has answered, in the order in which the first did."""
    others = [set(run.samples.task_names) for run in runs[1:]]
    names = (name for name in runs[0].samples.task_names if name) if runs else iter(())
    return [name for name in names if all(name in other for other in others)][:limit]


def _flat(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(config, Mapping) and config:
        return [
            pair
            for key, value in config.items()
            for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, config)]
