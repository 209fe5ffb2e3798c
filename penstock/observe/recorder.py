"""Emits events for a process, so that its name and clock are given once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock.observe.events import AnyEvent, Attribute, Counters, Doing, LogLine, PhaseEvent, Span
from penstock.observe.pulse import Pulse
from penstock.records.interfaces import Clock


class EventSink(Protocol):
    """Takes events: the controller's `EventStream` or a worker's `EventQueue`. Cheap, and never raises."""

    def emit(self, event: AnyEvent) -> None: ...


class Recorder:
    """Emits the events of one process."""

    def __init__(self, sink: EventSink, process: str, clock: Clock, pulse: Pulse | None = None) -> None:
        self.process = process
        self.pulse = pulse or Pulse(clock)
        self._sink = sink
        self._clock = clock

    def now(self) -> float:
        return self._clock.time()

    def emit(self, event: AnyEvent) -> None:
        self._sink.emit(event)

    def span(
        self, track: str, name: str, start: float, end: float | None = None, /, **attributes: Attribute
    ) -> None:
        """Emit a span that began at `start` and ended at `end`, or ends now."""
        self._sink.emit(
            Span(
                process=self.process,
                time=self.now() if end is None else end,
                track=track,
                name=name,
                start=start,
                attributes=attributes,
            )
        )

    @contextmanager
    def measure(self, track: str, name: str, /, **attributes: Attribute) -> Iterator[None]:
        """Emit a span around a block, also when the block raises."""
        start = self.now()
        try:
            yield
        finally:
            self.span(track, name, start, None, **attributes)

    def count(self, **values: float) -> None:
        self._sink.emit(Counters(process=self.process, time=self.now(), values=values))

    def doing(self, what: str) -> None:
        self._sink.emit(Doing(process=self.process, time=self.now(), what=what))

    def phase(self, phase: str) -> None:
        self._sink.emit(PhaseEvent(process=self.process, time=self.now(), phase=phase))

    def log(self, line: str) -> None:
        self._sink.emit(LogLine(process=self.process, time=self.now(), line=line))
