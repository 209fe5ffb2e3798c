"""Answers questions about a run as a whole: status, log lines, time, cost, machine and config."""

import math
from typing import Any

import msgspec

from penstock.observe.reading.run_reading import RunReading
from penstock.observe.run_state import RECENT_STEPS
from penstock.page.chart_answers import last_step

SHOWN_LINES = 200
MAX_POINTS = 600
"""Most points of a counter's curve."""


def show_now(run: RunReading) -> dict[str, Any]:
    """Return what the terminal shows, with the run's folder, times and counts."""
    status = run.status()
    return {
        "name": run.name,
        "folder": str(run.folder),
        "is_running": run.is_running,
        "ended": _ended(run),
        "started_s": run.started_s,
        "now_s": run.now,
        "revision": run.revision,
        "last": last_step(run),
        "samples": len(run.samples),
        "drops": len(run.drops),
        "trained_groups": len(run.step_of_group),
        "evaluations": [[one.step, one.reward] for one in run.evaluations],
        "reward_steps": min(RECENT_STEPS, len(status.rewards)),
        "status": msgspec.to_builtins(status),
    }


def _ended(run: RunReading) -> str:
    """Return how the run ended: `done`, or `died` if no controller holds the folder and no end was recorded; ""
    while it is running."""
    if run.is_running:
        return ""
    return "done" if run.state.phase == "done" else "died"


def show_lines(run: RunReading) -> dict[str, Any]:
    return {"lines": [{"time": one.time, "line": one.line} for one in run.lines[-SHOWN_LINES:]]}


def show_time(run: RunReading) -> dict[str, Any]:
    sheet = [
        {
            "process": one.process,
            "total_s": one.total_s,
            "parts": list(one.parts.items()),
            "sums": list(one.sums.items()),
        }
        for one in run.time_sheet()
    ]
    return {"processes": sheet, "cost": msgspec.to_builtins(run.cost())}


def show_machine(run: RunReading) -> dict[str, Any]:
    """Return thinned counters of the machine and of every process."""
    names = sorted(run.counter_series.processes, key=lambda name: name != "machine")
    return {"processes": [{"process": name, "counters": _counters(run, name)} for name in names]}


def _counters(run: RunReading, process: str) -> dict[str, Any]:
    found = {}
    for name, series in run.counters(process).items():
        stride = max(1, math.ceil(len(series.times) / MAX_POINTS))
        found[name] = [series.times[::stride].tolist(), series.values[::stride].tolist()]
    return found


def show_config(run: RunReading) -> dict[str, Any]:
    return {"config": run.config}
