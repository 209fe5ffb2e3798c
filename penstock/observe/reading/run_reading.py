"""Reads a run from its event files: while it is running, after its end, and after it died.

run = RunReading(Path("runs/demo"))
while True:
    run.refresh()          # reads what was written since
    run.state.status()     # what the terminal shows
    run.steps.column("reward")
"""

import fcntl
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from penstock.errors import UserError
from penstock.observe.events import (
    ConfigEvent,
    Counters,
    Drop,
    EvaluationEvent,
    LogLine,
    RecoveryEvent,
    RunEvent,
    SampleEvent,
    Span,
    StalenessEvent,
    StepEvent,
    TokenTexts,
    UpdateEvent,
)
from penstock.observe.reading.counter_series import CounterSeries, Series
from penstock.observe.reading.frame_index import FrameIndex
from penstock.observe.reading.sample_table import Rows, SampleTable
from penstock.observe.reading.segment_follower import ReadFrame, SegmentFollower, shift
from penstock.observe.reading.staleness_table import StalenessTable
from penstock.observe.reading.step_table import StepTable
from penstock.observe.reading.token_trace import TokenTrace
from penstock.observe.run_state import RunState
from penstock.observe.status import RunStatus
from penstock.observe.store.segments import FOLDER, StepColumns, StoredStep, key_times, segment_path
from penstock.observe.store.session_number import read_head
from penstock.observe.time_sheet import Cost, ProcessTime, cost_of

LOCK = ".lock"
"""Lock file of a run folder, which a running controller holds (`penstock.run.run_folder`)."""
MAX_SPANS = 20_000
STATE_METRICS = ("staleness_mean", "staleness_max")
"""Metrics that the state needs of every step; of the last step it gets the whole row."""
_time = attrgetter("time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Describes one session of a run; a resumed run has several."""

    began: float
    step: int
    """The step that the session began at."""
    ended: float = 0.0
    """When it ended; of the last session, the time of its newest event."""


class RunReading:
    """Reads one run. All times are seconds since the run's first session began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        events = folder / FOLDER
        if not events.is_dir():
            raise UserError(
                f"{folder} has no events: {events} is missing; a run of this version writes it from its start"
            )
        self._facts = SegmentFollower(events, "facts")
        self._counters = SegmentFollower(events, "counters")
        self._samples = SegmentFollower(events, "samples")
        self._tokens = FrameIndex(events, "tokens")
        self._spans = FrameIndex(events, "spans")
        self._events = events
        self.revision = 0
        """Grows whenever something new was read."""
        self.started_s: float | None = None
        """Unix time at which the run began."""
        self.state = RunState(makes_rows=False)
        self.config: dict[str, Any] = {}
        self.num_gpus = 0
        self.sessions: list[Session] = []
        self.steps = StepTable()
        self.samples = SampleTable(FrameIndex(events, "texts"))
        self.staleness = StalenessTable()
        self.counter_series = CounterSeries()
        self.evaluations: list[EvaluationEvent] = []
        self.updates: list[UpdateEvent] = []
        self.recoveries: list[RecoveryEvent] = []
        self.drops: list[Drop] = []
        self.lines: list[LogLine] = []
        self.vocabulary: dict[int, str] = {}
        self.step_of_group: dict[int, int] = {}
        self._session = 0
        self._last_scored: int | None = None
        """Row of the newest sample that was scored."""

    def refresh(self) -> bool:
        """Read what was written since the last call, and return whether there was anything."""
        with without_collection():
            return self._refresh()

    def _refresh(self) -> bool:
        # Counters and samples before facts, so that what a fact of the same turn refers to is there.
        frames = [("samples", frame) for frame in self._samples.read()]
        frames += [("other", frame) for frame in self._counters.read()]
        frames += [("other", frame) for frame in self._facts.read()]
        if not frames:
            return False
        if self.started_s is None:
            first = read_head(segment_path(self._events, "facts", 0))
            self.started_s = first.began_s if first is not None else None
        frames.sort(key=lambda found: found[1].turn)
        for _, turn in groupby(frames, key=lambda found: found[1].turn):
            self._take_turn(list(turn))
        if len(self.steps):
            self.state.row = self.steps.row(-1)
        self.revision += 1
        return True

    @property
    def name(self) -> str:
        return self.state.name or self.folder.name

    @property
    def now(self) -> float:
        """Return the time of the newest event."""
        return self.state.now

    @property
    def is_running(self) -> bool:
        """Return whether a controller holds the folder's lock."""
        try:
            with (self.folder / LOCK).open("r") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def num_damaged(self) -> int:
        """Return how many files have an unreadable end although newer files exist."""
        return sum(one.num_damaged for one in (self._facts, self._counters, self._samples))

    def status(self) -> RunStatus:
        """Return what the terminal shows."""
        status = self.state.status()
        if status.last_sample is None or self._last_scored is None:
            return status
        text = self.samples.read(self._last_scored).answer
        return replace(status, last_sample=replace(status.last_sample, text=text))

    def counters(self, process: str) -> dict[str, Series]:
        return self.counter_series.of(process)

    def tokens(self, step: int, group: int, episode: int) -> list[TokenTrace]:
        """Return the samples of an answer that was trained in `step`, token by token; empty if they are not
        kept."""
        self._tokens.refresh()
        found: dict[int, TokenTrace] = {}
        for place in self._tokens.places:
            frame = self._tokens.read(place) if place.key == step else None
            for event in frame.records if frame is not None else ():
                if (event.group, event.episode) == (group, episode):
                    found[event.sample] = TokenTrace.of(event, self.vocabulary)
        return [found[sample] for sample in sorted(found)]

    @property
    def traced(self) -> list[tuple[int, int, int]]:
        """Return (step, group, episode) of every answer whose tokens are kept."""
        self._tokens.refresh()
        kept = {place.key for place in self._tokens.places}
        rows = self.samples.select()
        return [
            (head.step, head.group, head.episode)
            for row in rows[self.samples.columns["traced"][rows]].tolist()
            if (head := self.samples.head(row)).step is not None and head.step in kept
        ]

    def time_sheet(self) -> list[ProcessTime]:
        """Return where the time of the trainer and of each engine went while the run trained."""
        return self.state.time_sheet.processes()

    def cost(self) -> Cost:
        seconds = sum(session.ended - session.began for session in self.sessions)
        return cost_of(
            num_gpus=self.num_gpus,
            seconds=seconds,
            tokens=sum(engine.tokens.total for engine in self.state.engines),
            tokens_training=sum(engine.tokens_training for engine in self.state.engines),
            gpu_hour_price=self.config.get("observe", {}).get("gpu_hour_price"),
        )

    @property
    def tracks(self) -> list[tuple[str, str]]:
        """Return the (process, track) pairs of all spans that are kept."""
        return sorted({(span.process, span.track) for span in self.spans(limit=None)})

    def rows_of_drop(self, drop: Drop) -> Rows:
        return self.samples.select(group=drop.group, drop=drop.reason)

    def spans(
        self,
        start: float | None = None,
        end: float | None = None,
        *,
        process: str | None = None,
        track: str | None = None,
        limit: int | None = MAX_SPANS,
    ) -> list[Span]:
        """Return the spans that touch a time range, sorted by start; if there are more than `limit`, the
        longest."""
        found: list[Span] = []
        self._spans.refresh()
        for place in self._spans.places:
            seconds = self._spans.offset_s(place) - (self.started_s or 0.0)
            first, last = key_times(place.key)
            if (end is not None and first + seconds > end) or (start is not None and last + seconds < start):
                continue
            frame = self._spans.read(place)
            for span in frame.records if frame is not None else ():
                shift(span, seconds)
                if (
                    (start is None or span.time >= start)
                    and (end is None or span.start <= end)
                    and process in (None, span.process)
                    and track in (None, span.track)
                ):
                    found.append(span)
        if limit is not None and len(found) > limit:
            found = sorted(found, key=lambda span: span.start - span.time)[:limit]
        return sorted(found, key=lambda span: (span.start, -span.time))

    def _shift_of(self, frame: ReadFrame) -> float:
        return frame.offset_s - (self.started_s or 0.0)

    def _take_turn(self, frames: list[tuple[str, ReadFrame]]) -> None:
        records: list[Any] = []
        for kind, frame in frames:
            seconds = self._shift_of(frame)
            if kind == "samples":
                for number, sample in enumerate(frame.records, start=frame.first):
                    shift(sample, seconds)
                    self._take_sample(number, sample)
                continue
            if frame.session != self._session:
                self._session = frame.session
                self.steps.begin_session()
            for record in frame.records:
                if isinstance(record, StepColumns):
                    self.steps.add_columns(record.number, record.names)
                    continue
                shift(record, seconds)
                records.append(record)
        if len(records) > 1:
            records.sort(key=_time)
        for record in records:
            self._take(record)
        if self.sessions:
            self.sessions[-1] = replace(self.sessions[-1], ended=self.state.now)

    def _take_sample(self, number: int, sample: SampleEvent) -> None:
        if sample.step is not None and sample.step <= self.state.step and self.steps.last is not None:
            self.samples.undo(sample.step)
        if sample.failure is None and sample.reward is not None:
            self._last_scored = len(self.samples)
        self.samples.add(number, sample)
        self.state.on(sample)

    def _take(self, record: Any) -> None:
        match record:
            case StoredStep():
                self.steps.add(record)
                for group in record.groups:
                    self.step_of_group[group] = record.step
                record = self._step_event(record)
            case StalenessEvent():
                self.staleness.add(record)
            case Counters():
                self.counter_series.add(record)
            case Drop():
                self.drops.append(record)
            case EvaluationEvent():
                self.evaluations.append(record)
            case UpdateEvent():
                self.updates.append(record)
            case RecoveryEvent():
                self.recoveries.append(record)
            case LogLine():
                self.lines.append(record)
            case TokenTexts():
                self.vocabulary.update(record.texts)
            case ConfigEvent():
                self.config, self.num_gpus = json.loads(record.config), record.num_gpus
            case RunEvent() if record.folder:
                self.sessions.append(Session(began=record.time, step=record.step))
        self.state.on(record)

    def _step_event(self, step: StoredStep) -> StepEvent:
        return StepEvent(
            process=step.process,
            time=step.time,
            step=step.step,
            reward=step.reward,
            num_samples=step.num_samples,
            metrics=self.steps.values(-1, (*STATE_METRICS, *step.own_metrics)),
            seconds=step.seconds,
            waited_s=step.waited_s,
            took_s=step.took_s,
            max_staleness=step.max_staleness,
            groups=step.groups,
            waits=step.waits,
            own_metrics=step.own_metrics,
        )


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector: the million small records of a long run all stay, and searching them for
    cycles takes as long as reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
