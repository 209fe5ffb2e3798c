"""Carries a run's events from the parts that emit them to the readers that show and store them.

Emitting costs about a microsecond and never raises: an event is queued, and readers get it in a later turn of
the event loop. A reader that raises (a full disk, a closed terminal, a tracker's error) is taken off the
stream; the other readers get a log line about it, and the run continues.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from penstock.observe.events import AnyEvent, Counters, LogLine, SampleEvent, Span, TokensEvent
from penstock.observe.recorder import Recorder
from penstock.records.interfaces import Clock

CAPACITY = 100_000
"""Events that may wait for readers: some seconds of a large run."""
EXPENDABLE = (Span, Counters, SampleEvent, TokensEvent)
"""Event types that are dropped when the queue is full. Drops, steps and log lines are few, and always kept."""

Defer = Callable[[Callable[[], None]], object]


Subscription = tuple[str, Callable[[AnyEvent], None]]


class Reader(Protocol):
    """Gets every event, in order. `close` is called once, at the end of the run or after `on` has raised."""

    def on(self, event: AnyEvent) -> None: ...

    def close(self) -> None: ...


class EventStream:
    """Delivers events to readers. Used by one thread at a time: first the one that prepares a run, then the
    event loop that `move_to` names.

    `defer` schedules a function for later (`loop.call_soon`); without it, readers get events at once.
    """

    def __init__(self, clock: Clock, *, defer: Defer | None = None, capacity: int = CAPACITY) -> None:
        self.clock = clock
        self.num_lost = 0
        self._defer = defer
        self._capacity = capacity
        self._readers: dict[str, Reader] = {}
        self._kinds: dict[str, tuple[type, ...]] = {}
        self._told: dict[type, list[Subscription]] = {}
        """The readers of each event type, looked up at its first event."""
        self._waiting: deque[AnyEvent] = deque()
        self._scheduled = False

    def move_to(self, clock: Clock, defer: Defer) -> None:
        """Take times from this clock from now on, and deliver events in later turns of its loop."""
        self.clock, self._defer = clock, defer

    def of(self, process: str) -> Recorder:
        """Return a recorder that emits events of one process into this stream."""
        return Recorder(self, process, self.clock)

    def subscribe(self, name: str, reader: Reader, *, only: tuple[type, ...] = (object,)) -> None:
        """Deliver events of the kinds in `only` to this reader, after all readers that subscribed before it. A
        failure is reported under `name`."""
        self._readers[name] = reader
        self._kinds[name] = only
        self._told.clear()

    def emit(self, event: AnyEvent) -> None:
        if len(self._waiting) >= self._capacity and isinstance(event, EXPENDABLE):
            self.num_lost += 1
            return
        self._waiting.append(event)
        if not self._scheduled:
            self._scheduled = True
            if self._defer is None:
                self.flush()
            else:
                self._defer(self.flush)

    def flush(self) -> None:
        """Deliver all queued events."""
        self._scheduled = True  # events that readers emit join the queue being read
        while self._waiting:
            event = self._waiting.popleft()
            for name, on in self._told.get(type(event)) or self._readers_of(type(event)):
                try:
                    on(event)
                except Exception as error:
                    self._detach(name, error)
        self._scheduled = False

    def _readers_of(self, kind: type) -> list[Subscription]:
        self._told[kind] = [
            (name, reader.on) for name, reader in self._readers.items() if issubclass(kind, self._kinds[name])
        ]
        return self._told[kind]

    def close(self) -> None:
        """Deliver the remaining events, then close every reader. Idempotent."""
        if self.num_lost:
            self.of("controller").log(
                f"{self.num_lost} events came faster than they were read, and were left out"
            )
            self.num_lost = 0
        self.flush()
        for name, reader in tuple(self._readers.items()):
            self._forget(name)
            try:
                reader.close()
            except Exception as error:
                self._report(name, error)
        self._waiting.clear()

    def _detach(self, name: str, error: Exception) -> None:
        with contextlib.suppress(Exception):  # it has failed already, as the report below says
            self._forget(name).close()
        self._report(name, error)

    def _forget(self, name: str) -> Reader:
        self._told.clear()
        return self._readers.pop(name)

    def _report(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        line = f"{name} failed and gets no more of this run ({reason}); the run continues"
        for reader in tuple(self._readers.values()):
            with contextlib.suppress(Exception):  # its next event finds it failing too
                reader.on(LogLine(process="controller", time=self.clock.time(), line=line))
