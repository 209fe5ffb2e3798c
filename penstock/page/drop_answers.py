"""Answers questions about dropped groups: the reason of each, and how they differ from trained ones."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.observe.events import Drop
from penstock.observe.reading.run_reading import RunReading
from penstock.page.query_values import whole
from penstock.page.sample_answers import describe

MAX_LISTED = 100
MAX_TASKS = 20
BINS = 20


def show_drops(run: RunReading, query: Mapping[str, str]) -> dict[str, Any]:
    """Return drops, newest first, of one reason if the query names one."""
    wanted = query.get("reason", "")
    chosen = [drop for drop in run.drops if not wanted or drop.reason == wanted][::-1]
    offset = whole(query, "offset", 0)
    reasons = Counter(drop.reason for drop in run.drops)
    return {
        "total": len(run.drops),
        "matched": len(chosen),
        "tokens": sum(drop.num_tokens for drop in run.drops),
        "reasons": [
            {"reason": reason, "groups": groups, "tokens": _tokens(run, reason)}
            for reason, groups in reasons.most_common()
        ],
        "rows": [_row(run, drop) for drop in chosen[offset : offset + MAX_LISTED]],
        "lengths": compare_lengths(run),
        "tasks": compare_tasks(run),
    }


def _tokens(run: RunReading, reason: str) -> int:
    return sum(drop.num_tokens for drop in run.drops if drop.reason == reason)


def _row(run: RunReading, drop: Drop) -> dict[str, Any]:
    rows = run.rows_of_drop(drop)
    first = rows[0] if len(rows) else None
    return {
        "group": drop.group,
        "task": drop.task_id,
        "reason": drop.reason,
        "message": drop.message,
        "age": drop.age,
        "tokens": drop.num_tokens,
        "time": drop.time,
        "samples": len(rows),
        "sample": None if first is None else describe(run, int(first), shorten=True),
    }


def compare_lengths(run: RunReading) -> dict[str, Any] | None:
    """Return histograms and means of the lengths of kept and of dropped answers, or None unless there are some
    of each."""
    columns = run.samples.columns
    dropped = columns["drop"] > 0
    tokens = columns["tokens"]
    if not dropped.any() or dropped.all():
        return None
    edges = np.linspace(0, max(1, int(tokens.max())), BINS + 1)
    kept, _ = np.histogram(tokens[~dropped], edges)
    lost, _ = np.histogram(tokens[dropped], edges)
    return {
        "edges": edges.tolist(),
        "kept": (kept / kept.sum()).tolist(),
        "dropped": (lost / lost.sum()).tolist(),
        "kept_mean": float(tokens[~dropped].mean()),
        "dropped_mean": float(tokens[dropped].mean()),
    }


def compare_tasks(run: RunReading) -> list[dict[str, Any]]:
    """Return the tasks that lose the most answers."""
    columns, names = run.samples.columns, run.samples.task_names
    dropped = columns["drop"] > 0
    total = np.bincount(columns["task"], minlength=len(names))
    lost = np.bincount(columns["task"][dropped], minlength=len(names))
    order = np.argsort(-lost, kind="stable")[:MAX_TASKS]
    return [
        {"task": names[code], "dropped": int(lost[code]), "kept": int(total[code] - lost[code])}
        for code in order
        if lost[code]
    ]
