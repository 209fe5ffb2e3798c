"""Writes every event of a run into `RUN/events`, in the format of `segments`.

Frequent events are bounded: when counters or spans have filled their budget, their oldest segment is deleted;
of samples, texts and tokens an even share of all old ones stays. Facts are never deleted, and a drop is a
fact: even when its texts are gone, that it happened, why, and what it cost stay known.
"""

import functools
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.observe.event_stream import Reader
from penstock.observe.events import (
    AnyEvent,
    CheckpointEvent,
    Counters,
    Doing,
    Drop,
    PhaseEvent,
    RunEvent,
    SampleEvent,
    Span,
    StepEvent,
    TokensEvent,
)
from penstock.observe.run_state import RunState
from penstock.observe.store.segment_writer import SegmentWriter
from penstock.observe.store.segments import (
    FOLDER,
    FORMAT,
    KINDS,
    RECORDS_OF_A_FRAME,
    Kind,
    SegmentHead,
    StepColumns,
    StoredStep,
    Texts,
    segments_of,
)
from penstock.observe.store.session_number import next_session

FLUSH_S = 0.5
FLUSH_EVENTS = 2_000
AT_ONCE = frozenset({StepEvent, Drop, PhaseEvent, CheckpointEvent})
"""Event types that are written at once, with all events before them."""
SESSION_RECORDS = 1 << 32
"""Each session numbers its records from its own multiple of this."""
SAMPLES_SHARE, COUNTERS_SHARE = 0.2, 0.2
"""Shares of a budget: samples beside their texts, counters beside spans."""


def budgets(*, samples_mb: float, tokens_mb: float, spans_mb: float) -> dict[Kind, int]:
    """Return the byte budget of each kind; 0 keeps none."""
    samples, tokens, spans = (int(size * 1e6) for size in (samples_mb, tokens_mb, spans_mb))
    return {
        "counters": int(spans * COUNTERS_SHARE),
        "spans": int(spans * (1 - COUNTERS_SHARE)),
        "samples": int(samples * SAMPLES_SHARE),
        "texts": int(samples * (1 - SAMPLES_SHARE)),
        "tokens": tokens,
    }


class EventStore(Reader):
    """Stores events, as a `penstock.observe.event_stream.Reader`. It must subscribe after `state`, whose row of
    a step it stores."""

    def __init__(
        self,
        folder: Path,
        state: RunState,
        budget: Mapping[Kind, int],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder / FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._state = state
        self._budget = dict(budget)
        self._wall = wall
        self._session = next_session(self._folder)
        self._writers: dict[Kind, SegmentWriter] = {}
        self._waiting: dict[Kind, list[msgspec.Struct]] = {kind: [] for kind in KINDS}
        self._num_waiting = 0
        self._columns: dict[tuple[str, ...], int] = {}
        self._last_prompt: str | None = None
        self._flushed = float("-inf")
        self._turn = self._session * SESSION_RECORDS
        self._keepers: dict[type, Callable[[Any], None]] = {
            Counters: self._add_counters,
            Doing: functools.partial(self._add, "counters"),
            Span: functools.partial(self._add, "spans"),
            TokensEvent: functools.partial(self._add, "tokens"),
            SampleEvent: self._add_sample,
            StepEvent: self._add_step,
        }
        """How each event type is stored; other types are facts."""

    def on(self, event: AnyEvent) -> None:
        if not self._writers:
            self._open(event)
        kind = type(event)
        keep = self._keepers.get(kind)
        if keep is None:
            self._add("facts", event)
        else:
            keep(event)
        if kind in AT_ONCE or event.time - self._flushed >= FLUSH_S or self._num_waiting >= FLUSH_EVENTS:
            self._flushed = event.time
            self.flush()

    def flush(self) -> None:
        """Write the waiting records, one frame for each kind that has any."""
        for kind, records in self._waiting.items():
            if records:
                self._writers[kind].write(self._turn, records)
                records.clear()
        self._turn += 1
        self._num_waiting = 0

    def close(self) -> None:
        if self._writers:
            self.flush()
        for writer in self._writers.values():
            writer.close()

    def _open(self, event: AnyEvent) -> None:
        """Open a writer for each kind. The first event shows which clock the run uses."""
        offset_s = event.wall_s - event.time if isinstance(event, RunEvent) else self._wall() - event.time
        began_s = offset_s + event.time
        for kind in KINDS:
            head = SegmentHead(
                format=FORMAT, kind=kind, session=self._session, offset_s=offset_s, began_s=began_s
            )
            there = segments_of(self._folder, kind)
            self._writers[kind] = SegmentWriter(
                self._folder,
                head,
                number=there[-1] + 1 if there else 0,
                first=self._session * SESSION_RECORDS,
                max_bytes=None if kind == "facts" else self._budget.get(kind, 0),
            )

    def _add_counters(self, event: Counters) -> None:
        if event.values:  # an event without values is a heartbeat
            self._add("counters", event)

    def _add(self, kind: Kind, record: msgspec.Struct) -> None:
        if kind != "facts" and not self._budget.get(kind):
            return
        self._waiting[kind].append(record)
        self._num_waiting += 1

    def _add_sample(self, event: SampleEvent) -> None:
        begins_frame = len(self._waiting["texts"]) % RECORDS_OF_A_FRAME["texts"] == 0
        same = event.prompt == self._last_prompt and not begins_frame
        self._last_prompt = event.prompt
        prompt = None if same else event.prompt
        texts = Texts(
            prompt=prompt,
            answer=event.answer,
            message=event.message,
            turns=event.turns,
            extra=event.extra,
        )
        self._add("texts", texts)
        bare = msgspec.structs.replace(event, prompt="", answer="", message="", turns=(), extra={})
        self._add("samples", bare)

    def _add_step(self, event: StepEvent) -> None:
        row = self._state.row or event.metrics
        names = tuple(row)
        number = self._columns.get(names)
        if number is None:
            number = self._columns[names] = len(self._columns)
            self._add("facts", StepColumns(number=number, names=names))
        self._add(
            "facts",
            StoredStep(
                process=event.process,
                time=event.time,
                step=event.step,
                reward=event.reward,
                num_samples=event.num_samples,
                columns=number,
                values=array("d", row.values()).tobytes(),
                seconds=event.seconds,
                waited_s=event.waited_s,
                took_s=event.took_s,
                max_staleness=event.max_staleness,
                groups=event.groups,
                waits=event.waits,
                own_metrics=event.own_metrics,
            ),
        )
