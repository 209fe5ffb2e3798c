"""Writes the trace of `penstock trace`: one track for each slot and stage, counters, and arrows from a rollout
to the step that trained on it and from a step to the update that brought its weights to an engine."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.observe.events import Span
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.trace.trace_file import TraceFile
from penstock.safe_files import open_private

NAME = "trace.pftrace"
REQUEST = re.compile(r"g(\d+)\.")
"""An engine's request is named after its group, as in `g12.3.0`."""
COUNTED = ("running", "waiting", "outstanding", "generating", "scoring", "ready", "free_blocks")
"""Counters that rise and fall."""
OF_STEPS = ("reward", "staleness_mean", "ess", "kl")
"""Metrics of steps that are drawn as counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    path: Path
    num_slices: int
    num_flows: int
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class Flows:
    """Holds the arrows that leave and reach each span, by the span's index in a list."""

    leaving: defaultdict[int, list[int]]
    arriving: defaultdict[int, list[int]]
    count: int = 0

    def connect(self, start: int, end: int) -> None:
        self.count += 1
        self.leaving[start].append(self.count)
        self.arriving[end].append(self.count)


def write_trace(run: RunReading, path: Path | None = None) -> TraceReport:
    """Write all spans that are kept. The file at `path` is replaced once the trace is whole."""
    path = path or run.folder / NAME
    unnamed = path.with_name(f".{path.name}.new")
    spans = run.spans(limit=None)
    flows = connect(spans, run)
    try:
        with open_private(unnamed, "wb") as file:
            trace = TraceFile(file)
            processes = {name: trace.process(name) for name in _processes(spans, run)}
            by_track: dict[tuple[str, str], list[int]] = {}
            for place, span in enumerate(spans):
                by_track.setdefault((span.process, span.track), []).append(place)
            for process, name in sorted(by_track, key=_natural):
                track = trace.track(processes[process], name)
                _write_track(trace, track, by_track[process, name], spans, flows)
            _write_counters(trace, processes, run)
            trace.flush()
        unnamed.replace(path)
    finally:
        unnamed.unlink(missing_ok=True)
    size = path.stat().st_size
    return TraceReport(path=path, num_slices=trace.num_slices, num_flows=trace.num_flows, num_bytes=size)


def connect(spans: list[Span], run: RunReading) -> Flows:
    """Connect rollouts with the steps that trained on them, and steps with the updates that sent their weights."""
    flows = Flows(leaving=defaultdict(list), arriving=defaultdict(list))
    steps: dict[int, int] = {}
    rollouts: dict[int, list[int]] = {}
    of_groups: dict[int, int] = {}
    for place, span in enumerate(spans):
        if span.name == "step" and span.process != "controller":
            steps[int(span.attributes["step"])] = place
        elif span.name == "generate" and "request" in span.attributes:
            named = REQUEST.match(str(span.attributes["request"]))
            if named is not None:
                rollouts.setdefault(int(named[1]), []).append(place)
        elif span.name == "generate" and "group" in span.attributes:
            of_groups[int(span.attributes["group"])] = place
    for group, step in run.step_of_group.items():
        starts = rollouts.get(group) or ([of_groups[group]] if group in of_groups else [])
        for start in starts if step in steps else ():
            flows.connect(start, steps[step])
    made_by = {update.version: update.step for update in run.updates}
    for place, span in enumerate(spans):
        step_made = made_by.get(int(span.attributes.get("version", -1)))
        if span.name == "update" and span.process != "controller" and step_made in steps:
            flows.connect(steps[step_made], place)
    return flows


def nested(places: Iterable[int], spans: list[Span]) -> Iterator[tuple[float, int | None]]:
    """Yield (time, span) where a slice of a track begins and (time, None) where one ends, in time order. A slice
    that outlasts its parent, which only rounding causes, is cut to end with it."""
    ends: list[float] = []
    for place in sorted(places, key=lambda place: (spans[place].start, -spans[place].time)):
        span = spans[place]
        while ends and ends[-1] <= span.start:
            yield ends.pop(), None
        yield span.start, place
        ends.append(min(max(span.time, span.start), ends[-1] if ends else float("inf")))
    while ends:
        yield ends.pop(), None


def _write_track(trace: TraceFile, track: int, places: list[int], spans: list[Span], flows: Flows) -> None:
    for time, place in nested(places, spans):
        if place is None:
            trace.end(track, time)
            continue
        span = spans[place]
        name = span.name
        if name == "step" and "step" in span.attributes:
            name = f"step {span.attributes['step']}"
        arrows = {"flows": flows.leaving.get(place, ()), "ends": flows.arriving.get(place, ())}
        trace.begin(track, time, name, span.attributes, **arrows)


def _write_counters(trace: TraceFile, processes: dict[str, int], run: RunReading) -> None:
    for process in run.counter_series.processes:
        for name, series in run.counters(process).items():
            if name in COUNTED or process == "machine":
                track = trace.counter_track(processes[process], name)
                for time, value in zip(series.times.tolist(), series.values.tolist(), strict=True):
                    trace.count(track, time, value)
    for name in OF_STEPS:
        column = run.steps.column(name)
        if (column == column).any():
            track = trace.counter_track(processes["trainer"], name)
            for time, value in zip(run.steps.times.tolist(), column.tolist(), strict=True):
                if value == value:
                    trace.count(track, time, value)


def _processes(spans: list[Span], run: RunReading) -> list[str]:
    """Return the processes in reading order: trainer, controller, then the others by name."""
    found = {span.process for span in spans} | {*run.counter_series.processes, "trainer"}
    first = ("trainer", "controller")
    return [*(name for name in first if name in found), *sorted(found - set(first))]


def _natural(track: tuple[str, str]) -> tuple[str, list[tuple[int, str]]]:
    """Sort slot 10 after slot 9."""
    words = re.split(r"(\d+)", track[1])
    return track[0], [(int(word), "") if word.isdigit() else (-1, word) for word in words]
