"""Who reads the stream: metric writers, the view, and a list for tests. Each stands on a `RunState` that was
subscribed before it, and so has seen every event that it sees."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

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
from penstock.observe.writers import MetricsWriter

DRAW_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run's events and the state that they make. A view reads it from the first line on, also before there is a
    session."""

    stream: EventStream
    state: RunState

    @property
    def events(self) -> Recorder:
        return self.stream.of("controller")

    def keep(self, writers: Sequence[MetricsWriter], samples: Reader | None = None) -> None:
        """Let writers read it too, once there is a folder to write into."""
        for writer in writers:
            self.stream.subscribe(writer.name, MetricsReader(self.state, writer))
        if samples is not None:
            self.stream.subscribe("samples.jsonl", samples)
        self.stream.subscribe("learning signal", LearningSignal(self.events))


class MonotonicClock:
    """The clock of a real event loop, where none runs yet."""

    def time(self) -> float:
        return time.monotonic()


def show(view: View) -> ShownRun:
    """A run that begins, in the thread that prepares it."""
    stream, state = EventStream(MonotonicClock()), RunState()
    stream.subscribe("state", state)
    stream.subscribe("view", ViewReader(state, view))
    return ShownRun(stream, state)


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
    """One row a step and one an evaluation, into `metrics.jsonl` or a tracker."""

    def __init__(self, state: RunState, writer: MetricsWriter) -> None:
        self._state = state
        self._writer = writer
        self._losses_told: dict[str, float] = {}

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, StepEvent):
            self._writer.write(event.step, self._state.row)
            self._losses_told = self._state.loss_counts()
        elif isinstance(event, EvaluationEvent):
            self._writer.write(event.step, {"heldout_reward": event.reward})

    def close(self) -> None:
        """What was lost after the last step has no row yet."""
        losses = self._state.loss_counts()
        try:
            if losses != self._losses_told:
                self._writer.write(self._state.step, losses)
        finally:
            self._writer.close()


class ViewReader:
    """Draws the state when something has happened, but not more often than a person can read."""

    def __init__(self, state: RunState, view: View) -> None:
        self._state = state
        self._view = view
        self._drawn = float("-inf")

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, LogLine):
            self._view.log(event.line)
        elif isinstance(event, Drop) and self._state.drops[event.reason] == 1:
            self._view.log(
                f"dropped a group ({event.reason}): {event.message}; further ones are counted, not printed"
            )
        elif isinstance(event, SampleEvent) and self._state.failures[event.failure or ""] == 1:
            self._view.log(
                f"an episode of task {event.task_id!r} failed ({event.failure}): {event.message}; further ones are "
                "counted, not printed"
            )
        if isinstance(event, PhaseEvent) or self._state.now - self._drawn >= DRAW_EVERY_S:
            self._drawn = self._state.now
            self._view.update(self._state.status())

    def close(self) -> None:
        self._view.close()
