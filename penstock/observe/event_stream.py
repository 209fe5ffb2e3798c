"""The one stream of a run's events: whoever works emits, whoever shows reads.

Emitting costs about a microsecond and never raises: an event is put in line, and readers get it in a later turn of
the event loop. A reader that raises (a full disk, a closed terminal, a tracker's error) is taken off the stream
with a word to the others; the run goes on.
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
"""What is left out when the line is full. Drops, steps and lines are few, and are always kept."""

Defer = Callable[[Callable[[], None]], object]


Told = tuple[str, Callable[[AnyEvent], None]]


class Reader(Protocol):
    """Told of every event, in order. `close` comes once, at the end of the run or when `on` has raised."""

    def on(self, event: AnyEvent) -> None: ...

    def close(self) -> None: ...


class EventStream:
    """Used by one thread at a time: by whoever prepares a run, then by the event loop that it moves to.

    `defer` runs a function a little later (`loop.call_soon`); without it readers are told at once."""

    def __init__(self, clock: Clock, *, defer: Defer | None = None, capacity: int = CAPACITY) -> None:
        self.clock = clock
        self.num_lost = 0
        self._defer = defer
        self._capacity = capacity
        self._readers: dict[str, Reader] = {}
        self._kinds: dict[str, tuple[type, ...]] = {}
        self._told: dict[type, list[Told]] = {}
        """Who is told of each kind of event, as it was last asked for."""
        self._waiting: deque[AnyEvent] = deque()
        self._scheduled = False

    def move_to(self, clock: Clock, defer: Defer) -> None:
        """From now on times are of this clock, and readers are told in later turns of its loop."""
        self.clock, self._defer = clock, defer

    def of(self, process: str) -> Recorder:
        """The stream as one process uses it."""
        return Recorder(self, process, self.clock)

    def subscribe(self, name: str, reader: Reader, *, only: tuple[type, ...] = (object,)) -> None:
        """Readers are told in the order in which they came, each of events of the kinds that it names. `name` is
        how a failure is reported."""
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
        """Tell readers all that waits for them."""
        self._scheduled = True  # what readers emit joins the line that is being read
        while self._waiting:
            event = self._waiting.popleft()
            for name, on in self._told.get(type(event)) or self._readers_of(type(event)):
                try:
                    on(event)
                except Exception as error:
                    self._detach(name, error)
        self._scheduled = False

    def _readers_of(self, kind: type) -> list[Told]:
        self._told[kind] = [
            (name, reader.on) for name, reader in self._readers.items() if issubclass(kind, self._kinds[name])
        ]
        return self._told[kind]

    def close(self) -> None:
        """Tell what is left, then close every reader. Idempotent."""
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
        with contextlib.suppress(Exception):  # it has failed already, which is said below
            self._forget(name).close()
        self._report(name, error)

    def _forget(self, name: str) -> Reader:
        self._told.clear()
        return self._readers.pop(name)

    def _report(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        line = f"{name} failed and gets no more of this run ({reason}); the run goes on"
        for reader in tuple(self._readers.values()):
            with contextlib.suppress(Exception):  # its next event finds it failing too
                reader.on(LogLine(process="controller", time=self.clock.time(), line=line))
