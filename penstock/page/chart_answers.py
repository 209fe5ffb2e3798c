"""Answers requests for curves: a few hundred points a metric, each with the lowest and highest value it covers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.observe.reading.run_reading import RunReading
from penstock.observe.reading.step_table import Axis, Floats
from penstock.page.query_values import Refused, chosen, whole

X_AXES: tuple[Axis, ...] = ("step", "time", "tokens")
MAX_NAMES = 64
MAX_NEW_ROWS = 64
"""Most new steps that a message carries; if there are more, the page requests whole curves."""


def show_curves(run: RunReading, query: Mapping[str, str]) -> dict[str, Any]:
    names = [name for name in query.get("names", "reward").split(",") if name]
    if len(names) > MAX_NAMES:
        raise Refused(f"at most {MAX_NAMES} metrics at once, got {len(names)}")
    x = chosen(query, "x", X_AXES)
    buckets = whole(query, "buckets", 500, low=1, high=5000)
    known = set(run.steps.names)
    return {
        "x": x,
        "last": last_step(run),
        "curves": {name: thinned(run, name, x, buckets) for name in names if name in known},
    }


def thinned(run: RunReading, name: str, x: Axis, buckets: int) -> list[list[float]]:
    """Return the columns x, low, high and mean of a curve."""
    points = run.steps.thinned(name, x=x, buckets=buckets)
    return [
        [point.x for point in points],
        [point.low for point in points],
        [point.high for point in points],
        [point.mean for point in points],
    ]


def last_step(run: RunReading) -> int:
    return 0 if run.steps.last is None else run.steps.last.step


def list_metrics(run: RunReading) -> dict[str, Any]:
    values = run.steps.row(-1) if last_step(run) else {}
    return {"last": last_step(run), "names": run.steps.names, "values": values, "same": same_rewards(run)}


def same_rewards(run: RunReading) -> dict[str, str]:
    """Return the rewards whose curve equals an earlier one's, with its name: with one function of weight 1,
    `reward_mean` and the function's own mean are `reward`."""
    kept, same = dict[str, Floats](), dict[str, str]()
    for name in run.steps.names:
        if name.startswith("reward"):
            column = run.steps.column(name)
            equal = (one for one, other in kept.items() if np.allclose(column, other, equal_nan=True))
            twin = next(equal, None)
            if twin is None:
                kept[name] = column
            else:
                same[name] = twin
    return same


def new_rows(run: RunReading, since: int) -> dict[str, Any] | None:
    """Return the steps after `since` with all their metrics. Return None if they are too many for a message, or
    if the run was set back to before `since`. The cost grows with the new steps, not with the run."""
    if last_step(run) < since:
        return None
    steps = run.steps.stored
    first = len(steps)
    while first > 0 and steps[first - 1].step > since:
        first -= 1
        if len(steps) - first > MAX_NEW_ROWS:
            return None
    rows = [run.steps.row(index) for index in range(first, len(steps))]
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        "steps": [step.step for step in steps[first:]],
        "times": [step.time for step in steps[first:]],
        "values": {name: [row.get(name, math.nan) for row in rows] for name in names},
    }
