"""Answers requests for a time range: its spans, track by track, and the steps that trained the groups in it."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.observe.events import Attribute
from penstock.observe.reading.run_reading import RunReading
from penstock.page.query_values import span_of, whole

MAX_SPANS = 20_000
REQUEST = re.compile(r"g(\d+)\.")
FIRST_S = 20.0
"""Seconds shown at first: the last ones of the run."""


def show_timeline(run: RunReading, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the spans of a time range. Times are seconds since the run began. A span is [track, start, end,
    name, group, step]."""
    wanted = span_of(query, "time")
    start, end = (max(0.0, run.now - FIRST_S), run.now) if wanted is None else wanted
    limit = whole(query, "limit", MAX_SPANS, low=1, high=MAX_SPANS)
    spans = run.spans(start=start, end=end, limit=limit)
    tracks: dict[tuple[str, str], int] = {}
    names: dict[str, int] = {}
    rows: list[list[Any]] = []
    for span in spans:
        track = tracks.setdefault((span.process, span.track), len(tracks))
        name = names.setdefault(span.name, len(names))
        step = span.attributes.get("step")
        rows.append([track, round(span.start, 6), round(span.time, 6), name, _group(span.attributes), step])
    groups = {row[4] for row in rows if row[4] is not None}
    return {
        "start": start,
        "end": end,
        "now": run.now,
        "is_cut": len(rows) >= limit,
        "tracks": [list(track) for track in tracks],
        "names": list(names),
        "spans": rows,
        "steps": {str(group): run.step_of_group[group] for group in groups if group in run.step_of_group},
        "updates": [[one.time, one.version] for one in run.updates if start <= one.time <= end],
    }


def _group(attributes: Mapping[str, Attribute]) -> int | None:
    """Return the group that a span belongs to, from its own attribute or from the name of its request."""
    group = attributes.get("group")
    if isinstance(group, int):
        return group
    request = REQUEST.match(str(attributes.get("request", "")))
    return None if request is None else int(request[1])
