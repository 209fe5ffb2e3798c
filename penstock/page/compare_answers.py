"""Compares several runs: what differs in their configs, their curves, and their answers to one prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.sample_table import Rows
from penstock.page.chart_answers import X_AXES, thinned
from penstock.page.query_values import Refused, chosen
from penstock.page.sample_answers import describe


class Unset:
    """Stands for a setting that a run of another version does not have."""

    def __repr__(self) -> str:
        return "–"


UNSET = Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Holds a setting's dotted name and its value in each run."""

    name: str
    values: tuple[Any, ...]


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return the settings that differ between configs, by name."""
    flat = [dict(_flat(config)) for config in configs]
    names = sorted({name for one in flat for name in one})
    rows = [Difference(name=name, values=tuple(one.get(name, UNSET) for one in flat)) for name in names]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def same_task(runs: Sequence[RunReading], task_id: str) -> list[Rows]:
    """Return each run's rows of answers to a task, oldest first."""
    return [run.samples.select(task=task_id) for run in runs]


def _flat(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(config, Mapping) and config:
        return [
            pair
            for key, value in config.items()
            for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, config)]


NO_DIFFERENCE = ("run.name", "run.folder")
"""Settings that only identify a run."""
MAX_TASKS = 200
MAX_ANSWERS = 4
"""How many of each run's newest answers are shown."""


def compare_runs(runs: Sequence[RunReading], query: Mapping[str, str]) -> dict[str, Any]:
    x = chosen(query, "x", X_AXES)
    names = [name for name in query.get("names", "reward").split(",") if name][:8]
    shared = [name for name in runs[0].steps.names if all(name in run.steps.names for run in runs)]
    return {
        "runs": [run.name for run in runs],
        "x": x,
        "names": shared,
        "differences": [
            [one.name, [None if value is UNSET else value for value in one.values]]
            for one in compare_configs([run.config for run in runs])
            if one.name not in NO_DIFFERENCE
        ],
        "curves": {
            name: [thinned(run, name, x, 500) if name in run.steps.names else None for run in runs]
            for name in names
        },
        "heldout": [[[one.step, one.reward] for one in run.evaluations] for run in runs],
    }


def shared_tasks(runs: Sequence[RunReading], query: Mapping[str, str]) -> dict[str, Any]:
    """Return tasks that all runs have answered; `find` matches a part of their names."""
    wanted = query.get("find", "").lower()
    sets = [set(run.samples.task_names) - {""} for run in runs]
    common = sorted(set.intersection(*sets))
    found = [task for task in common if wanted in task.lower()]
    return {"total": len(common), "tasks": found[:MAX_TASKS]}


def compare_answers(runs: Sequence[RunReading], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the newest answers of every run to one task."""
    task = query.get("task", "")
    if not task:
        raise Refused("task is missing: name the one whose answers to compare")
    return {
        "task": task,
        "runs": [
            {"name": run.name, "samples": [describe(run, int(row)) for row in rows[-MAX_ANSWERS:][::-1]]}
            for run, rows in zip(runs, same_task(runs, task), strict=True)
        ],
    }
