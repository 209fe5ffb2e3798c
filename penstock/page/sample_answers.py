"""Answers requests for samples: chosen by columns in memory, their texts read from disk."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.observe.events import CONTEXT, SampleEvent
from penstock.observe.reading.run_reading import RunReading
from penstock.page.query_values import Refused, chosen, optional_whole, span_of, whole

ORDERS = ("new", "old", "best", "worst", "long", "short", "stale")
SHOWN_PROMPT, SHOWN_ANSWER = 200, 320
"""Characters shown of a text in a list."""
MAX_LISTED = 200
MAX_OF_GROUP = 64
HISTOGRAMS = {"reward": 24, "tokens": 24, "age": 24}
"""Columns with a histogram, and the most bars of each."""


def list_samples(run: RunReading, query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of the samples that match the filters."""
    rows = _matching(run, query)
    ordered = _ordered(run, rows, chosen(query, "sort", ORDERS))
    offset = whole(query, "offset", 0)
    shown = ordered[offset : offset + whole(query, "limit", 50, high=MAX_LISTED)]
    return {
        "kept": len(run.samples),
        "matched": len(rows),
        "offset": offset,
        "rows": [describe(run, int(row), shorten=True) for row in shown],
        "steps": _steps(run),
    }


def count_samples(run: RunReading, query: Mapping[str, str]) -> dict[str, Any]:
    """Return histograms of the matching samples. Each ignores the filter on its own column, so that its other
    bars stay visible."""
    bars = {
        name: _bars(run, _matching(run, query, without=name), name, bins) for name, bins in HISTOGRAMS.items()
    }
    drops = run.samples.columns["drop"][_matching(run, query, without="drop")]
    counts = np.bincount(drops, minlength=len(run.samples.drop_names))
    named = zip(run.samples.drop_names, counts.tolist(), strict=False)
    return {**bars, "drop": [{"name": name, "count": count} for name, count in named if count]}


def show_sample(run: RunReading, row: int) -> dict[str, Any]:
    check_row(run, row)
    return describe(run, row)


def show_group(run: RunReading, group: int) -> dict[str, Any]:
    rows = run.samples.select(group=group)
    if not len(rows):
        raise Refused(f"no sample of group {group} is kept", 404)
    shown = rows[-MAX_OF_GROUP:]
    return {"group": group, "samples": [describe(run, int(row)) for row in shown], "count": len(rows)}


def check_row(run: RunReading, row: int) -> None:
    if not 0 <= row < len(run.samples):
        raise Refused(f"there is no sample {row}: {len(run.samples)} are kept", 404)


def describe(run: RunReading, row: int, *, shorten: bool = False) -> dict[str, Any]:
    """Return a sample as plain values for JSON."""
    event = run.samples.read(row)
    columns = run.samples.columns
    return {
        "row": row,
        "step": event.step,
        "group": event.group,
        "episode": event.episode,
        "task": event.task_id,
        "reward": event.reward,
        "parts": event.parts,
        "advantage": event.advantage,
        "tokens": event.num_output_tokens,
        "prompt_tokens": event.num_prompt_tokens,
        "turns": event.num_turns,
        "age": int(columns["age"][row]),
        "oldest": event.oldest_version,
        "newest": event.newest_version,
        "finish": event.finish_reason,
        "drop": event.drop,
        "failure": event.failure,
        "message": event.message,
        "has_tokens": bool(columns["traced"][row]),
        **_texts(event, shorten),
    }


def _texts(event: SampleEvent, shorten: bool) -> dict[str, Any]:
    kept = event.text_kept
    if not shorten:
        transcript = [
            {"label": one.label, "is_read": one.role == CONTEXT, "text": one.text} for one in event.turns
        ]
        return {
            "prompt": event.prompt,
            "answer": event.answer,
            "transcript": transcript,
            "extra": event.extra,
            "text_kept": kept,
        }
    return {"prompt": event.prompt[-SHOWN_PROMPT:], "answer": event.answer[:SHOWN_ANSWER], "text_kept": kept}


def _matching(run: RunReading, query: Mapping[str, str], without: str = "") -> Any:
    """Return the rows that match the filters, leaving out the filter named `without`."""
    wanted: dict[str, Any] = {
        "steps": span_of(query, "step"),
        "group": optional_whole(query, "group"),
        "reward": None if without == "reward" else span_of(query, "reward"),
        "tokens": None if without == "tokens" else span_of(query, "tokens"),
        "age": None if without == "age" else span_of(query, "age"),
        "drop": None if without == "drop" else query.get("drop") or None,
        "task": query.get("task") or None,
    }
    return run.samples.select(**{name: value for name, value in wanted.items() if value is not None})


def _ordered(run: RunReading, rows: Any, order: str) -> Any:
    """Sort rows; of equals the newest come first."""
    newest = rows[::-1]
    if order == "new":
        return newest
    if order == "old":
        return rows
    column, sign = {
        "best": ("reward", -1.0),
        "worst": ("reward", 1.0),
        "long": ("tokens", -1.0),
        "short": ("tokens", 1.0),
        "stale": ("age", -1.0),
    }[order]
    return newest[np.argsort(sign * run.samples.columns[column][newest], kind="stable")]


def _bars(run: RunReading, rows: Any, column: str, bins: int) -> dict[str, Any]:
    edges, counts = run.samples.histogram(column, rows, bins)
    return {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in counts]}


def _steps(run: RunReading) -> list[int] | None:
    """Return the first and the last step that has samples."""
    steps = run.samples.columns["step"]
    trained = steps[steps >= 0]
    return [int(trained.min()), int(trained.max())] if len(trained) else None
