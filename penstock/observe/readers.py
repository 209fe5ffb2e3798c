"""Defines the readers of the event stream: metric writers, the view, and a list for tests. Writers and view use
a `RunState` that subscribed before them, so it has already folded the event that they get."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.observe.event_queue import MonotonicClock
from penstock.observe.event_stream import EventStream, Reader
from penstock.observe.events import (
    AnyEvent,
    Drop,
    EvaluationEvent,
    LogLine,
    PhaseEvent,
    SampleEvent,
    StepEvent,
)
from penstock.observe.learning_signal import LearningSignal
from penstock.observe.recorder import Recorder
from penstock.observe.run_state import RunState
from penstock.observe.views import View
from penstock.observe.writers import MetricsWriter, SampleWriter, UndoingWriter
from penstock.observe.writers.sample_rows import EVERY_STEPS, SAMPLES_OF_A_STEP, sample_row

DRAW_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class ShownRun:
    """Holds a run's event stream and the state made from it. A view may follow it before there is a session."""

    stream: EventStream
    state: RunState
    tell: Callable[[str], None] = lambda line: None
    """Shows a line to the person who watches, and writes it to no file: it may hold a secret."""

    @property
    def events(self) -> Recorder:
        return self.stream.of("controller")

    def keep(self, writers: Sequence[MetricsWriter], store: Reader | None = None) -> None:
        """Subscribe writers and the learning signal, once there is a folder to write into. `store` keeps every
        event."""
        for writer in writers:
            reader = MetricsReader(self.state, writer)
            self.stream.subscribe(writer.name, reader, only=reader.kinds)
        if store is not None:
            self.stream.subscribe("events", store)
        self.stream.subscribe("learning signal", LearningSignal(self.events), only=(SampleEvent, StepEvent))


def show(view: View) -> ShownRun:
    """Begin to show a run, in the thread that prepares it."""
    stream, state = EventStream(MonotonicClock()), RunState()
    stream.subscribe("state", state)
    stream.subscribe("view", ViewReader(state, view))
    return ShownRun(stream, state, lambda line: _tell(view, line))


def _tell(view: View, line: str) -> None:
    with contextlib.suppress(
        Exception
    ):  # a failing view must not end the run; its next event takes it off the stream
        view.log(line)


class MemoryReader:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.closed = False

    def on(self, event: AnyEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class MetricsReader:
    """Writes one row for each step and each evaluation, into `metrics.jsonl` or a tracker."""

    def __init__(self, state: RunState, writer: MetricsWriter) -> None:
        self._state = state
        self._writer = writer
        self._samples_writer = writer if isinstance(writer, SampleWriter) else None
        self._undoing_writer = writer if isinstance(writer, UndoingWriter) else None
        self._last_step = 0
        self._losses_told: dict[str, float] = {}
        self._samples: list[SampleEvent] = []
        """Samples of the coming step, if the writer shows samples."""

    @property
    def kinds(self) -> tuple[type, ...]:
        shown = (SampleEvent,) if self._samples_writer is not None else ()
        return (StepEvent, EvaluationEvent, *shown)

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SampleEvent):
            if event.step is not None:
                self._samples.append(event)
        elif isinstance(event, StepEvent):
            self._write_samples(event.step)
            if event.step <= self._last_step and self._undoing_writer is not None:
                self._undoing_writer.undo_past(event.step - 1)
            self._last_step = event.step
            self._writer.write(event.step, self._state.row)
            self._losses_told = self._state.loss_counts()
        elif isinstance(event, EvaluationEvent):
            self._writer.write(event.step, {"heldout_reward": event.reward})

    def _write_samples(self, step: int) -> None:
        """Write a few samples at step 1 and every `EVERY_STEPS` steps: first those with traced tokens, then
        others."""
        chosen = sorted(self._samples, key=lambda sample: not sample.traced)[:SAMPLES_OF_A_STEP]
        self._samples.clear()
        if chosen and self._samples_writer is not None and (step == 1 or step % EVERY_STEPS == 0):
            self._samples_writer.write_samples(step, [sample_row(sample) for sample in chosen])

    def close(self) -> None:
        """Write the drops and failures since the last step, which no row has yet."""
        losses = self._state.loss_counts()
        try:
            if losses != self._losses_told:
                self._writer.write(self._state.step, losses)
        finally:
            self._writer.close()


class ViewReader:
    """Logs lines, and the first drop and failure of each kind. Draws the state at each new phase, and else at
    most every `DRAW_EVERY_S`."""

    def __init__(self, state: RunState, view: View) -> None:
        self._state = state
        self._view = view
        self._drawn = float("-inf")

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SampleEvent):
            if event.failure is not None and self._state.failures[event.failure] == 1:
                self._view.log(
                    f"an episode of task {event.task_id!r} failed ({event.failure}): {event.message}; further ones "
                    "are counted, not printed"
                )
        elif isinstance(event, LogLine):
            self._view.log(event.line)
        elif isinstance(event, Drop) and self._state.drops[event.reason] == 1:
            self._view.log(
                f"dropped a group ({event.reason}): {event.message}; further ones are counted, not printed"
            )
        if self._state.now - self._drawn >= DRAW_EVERY_S or isinstance(event, PhaseEvent):
            self._drawn = self._state.now
            self._view.update(self._state.status())

    def close(self) -> None:
        self._view.close()
