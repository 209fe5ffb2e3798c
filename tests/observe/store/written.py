"""Runs that were written to a folder, for whoever reads them."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.observe.events import AnyEvent, RunEvent, SampleEvent
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.run_state import RunState
from penstock.observe.store.event_store import EventStore, budgets
from penstock.observe.store.segment_writer import SegmentWriter
from penstock.observe.store.segments import Kind, SegmentHead
from tests.observe.examples import SAMPLE, run_event

KEPT = budgets(samples_mb=8, tokens_mb=8, spans_mb=8)


def write(folder: Path, events: Iterable[AnyEvent], *, budget=KEPT, close: bool = True) -> EventStore:
    """As a session does: the state reads each event before the store."""
    folder.mkdir(exist_ok=True, parents=True)
    state = RunState()
    store = EventStore(folder, state, budget)
    for event in events:
        state.on(event)
        store.on(event)
    if close:
        store.close()
    return store


def segment_writer(
    folder: Path, kind: Kind = "facts", *, number: int = 0, first: int = 0, max_bytes: int | None = None
) -> SegmentWriter:
    head = SegmentHead(format=1, kind=kind, session=0, offset_s=5.0)
    return SegmentWriter(folder, head, number=number, first=first, max_bytes=max_bytes)


def read(folder: Path) -> RunReading:
    run = RunReading(folder)
    run.refresh()
    return run


def sample(group: int, *, time: float = 104.0, **changes) -> SampleEvent:
    return msgspec.structs.replace(SAMPLE, group=group, time=time, **changes)


def begin(wall_s: float, time: float = 100.0) -> RunEvent:
    return msgspec.structs.replace(run_event(time), wall_s=wall_s)
