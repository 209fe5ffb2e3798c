"""What it costs to see a run: the events' share of its CPU time, their bytes, and how quickly they become a trace
and a page.

Emitting and writing are measured on the demo's own events. The run writes them as every run does; then all of them
are made again, emitted and written once more, and the CPU time of that stands against the CPU time of the run with
all of its processes (`event_cost_fraction`). `seeing_cost_fraction` is of the run itself and counts more: whatever
the controller does to tell of a run (finding texts, advantages, ages and metrics) and everyone who reads it, the
terminal's view and `metrics.jsonl` too. Answers of four tokens make it large. Ratios of CPU time hold on a busy
machine too; the page's time does not.
"""

import asyncio
import functools
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.made_run import write_made_run
from benchmarks.page_chart import first_chart_s
from penstock.api import cache_folder
from penstock.bench.saved_report import SavedReport
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.observe.event_queue import MonotonicClock
from penstock.observe.event_stream import EventStream
from penstock.observe.events import AnyEvent, StepEvent
from penstock.observe.readers import show
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.run_state import RunState
from penstock.observe.store.event_store import EventStore, budgets
from penstock.observe.store.segments import FOLDER
from penstock.observe.trace.run_trace import write_trace
from penstock.observe.views import SilentView
from penstock.run.arguments import DEMO
from penstock.run.controller_events import ControllerEvents
from penstock.run.preflight import prepare
from penstock.run.run import Run

DEMO_STEPS = 100
REPEATS = 5
LONG_STEPS, LONG_SAMPLES = 50_000, 2
TRACED_STEPS, TRACED_SPANS = 8_000, 12


class Recorded:
    """`penstock.observe.event_stream.Reader` that keeps every event, for the run that is measured."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def on(self, event: AnyEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


class SeeingTime:
    """CPU time of this thread inside what tells of a run and what reads it, while the context is open."""

    PLACES: tuple[tuple[type, str], ...] = (
        (EventStream, "flush"),
        *((ControllerEvents, name) for name in ("_follow", "waited", "trained", "dropped")),
    )

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._found: list[tuple[type, str, Any]] = []

    def __enter__(self) -> "SeeingTime":
        for owner, name in self.PLACES:
            method = getattr(owner, name)
            self._found.append((owner, name, method))
            setattr(owner, name, self._timed(method))
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, method in self._found:
            setattr(owner, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.cpu_s += time.thread_time() - begin

        return timed


def run(json: Path | None, *, steps: int = DEMO_STEPS, long_steps: int = LONG_STEPS) -> dict[str, Any]:
    report, console = SavedReport(json), Console()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        folder = Path(scratch)
        cost = event_cost(folder, steps)
        report.put("events", value=cost)
        told = ("event_cost_fraction", "seeing_cost_fraction", "bytes_per_1000_steps")
        report.headline({name: cost[name] for name in told})
        trace = trace_speed(folder, min(TRACED_STEPS, long_steps))
        report.put("trace", value=trace)
        report.headline({"trace_spans_per_s": trace["spans_per_s"]})
        page = page_speed(folder, long_steps)
        report.put("page", value=page)
        if page["first_chart_s"] is not None:
            report.headline({"page_first_chart_s": page["first_chart_s"]})
    for name, value in report.data["headline"].items():
        console.print(f"{name}: {value:.4g}", highlight=False)
    return report.data


def event_cost(folder: Path, steps: int) -> dict[str, Any]:
    """Of the demo, held-out evaluations left out."""
    words = ["eval.tasks=null", f"run.steps={steps}", f"run.folder={folder}", "run.name=demo"]
    config = load_config(PenstockConfig, DEMO, words)
    recorded = Recorded()
    begin = _cpu_s()
    prepared = prepare(config, log=lambda line: None, cache=cache_folder())
    shown = show(SilentView())
    shown.stream.subscribe("bench", recorded)
    with SeeingTime() as seeing:
        asyncio.run(Run(prepared, shown).run())
    run_s = _cpu_s() - begin
    replay_s = min(replay(recorded.events, folder / f"replay{number}") for number in range(REPEATS))
    num_bytes = sum(path.stat().st_size for path in (prepared.folder / FOLDER).iterdir())
    num_steps = sum(isinstance(event, StepEvent) for event in recorded.events)
    return {
        "event_cost_fraction": replay_s / run_s,
        "seeing_cost_fraction": seeing.cpu_s / run_s,
        "bytes_per_1000_steps": num_bytes / num_steps * 1000,
        "num_events": len(recorded.events),
        "us_per_event": replay_s / len(recorded.events) * 1e6,
        "run_cpu_s": run_s,
        "event_cpu_s": replay_s,
        "steps": num_steps,
    }


def replay(events: list[AnyEvent], folder: Path) -> float:
    """CPU seconds to make these events again, emit and write them."""
    folder.mkdir()
    stream, state = EventStream(MonotonicClock()), RunState()
    stream.subscribe("state", state)
    stream.subscribe("events", EventStore(folder, state, budgets(samples_mb=64, tokens_mb=64, spans_mb=128)))
    begin = time.process_time()
    for event in events:
        stream.emit(msgspec.structs.replace(event))
    stream.close()
    return time.process_time() - begin


def trace_speed(folder: Path, steps: int) -> dict[str, Any]:
    """CPU time from event files to a trace, reading included."""
    made = write_made_run(folder / "traced", steps=steps, samples_per_step=1, spans_per_step=TRACED_SPANS)
    begin = time.process_time()
    found = RunReading(made)
    found.refresh()
    report = write_trace(found)
    took_s = time.process_time() - begin
    return {
        "spans_per_s": report.num_slices / took_s,
        "num_spans": report.num_slices,
        "num_arrows": report.num_flows,
        "num_bytes": report.num_bytes,
    }


def page_speed(folder: Path, steps: int) -> dict[str, Any]:
    """Of a long run: reading it for the first time, and the page's first chart in Chromium."""
    made = write_made_run(folder / "long", steps=steps, samples_per_step=LONG_SAMPLES, tokens_per_answer=60)
    begin = time.process_time()
    RunReading(made).refresh()
    read_s = time.process_time() - begin
    return {
        "first_chart_s": first_chart_s(made),
        "read_cpu_s": read_s,
        "steps": steps,
        "samples": steps * LONG_SAMPLES,
    }


def _cpu_s() -> float:
    """Of this process and of all of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
