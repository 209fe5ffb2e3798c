"""Keeps a worker's events until the controller fetches them. Any thread may emit."""

import time
from collections import deque

from penstock.observe.events import AnyEvent, EventBatch
from penstock.observe.pulse import Pulse
from penstock.observe.recorder import Recorder

CAPACITY = 20_000
BATCH = 2_000
"""Events in one reply to the controller: a few hundred kilobytes."""


class MonotonicClock:
    """Reads `time.monotonic`, which on Linux is the same clock in every process of a machine."""

    def time(self) -> float:
        return time.monotonic()


class EventQueue:
    """Holds at most `capacity` events. When it is full, newer events are dropped and counted."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.clock = MonotonicClock()
        self.pulse = Pulse(self.clock)
        self._capacity = capacity
        self._events: deque[AnyEvent] = deque()
        self._num_lost = 0

    def of(self, process: str) -> Recorder:
        return Recorder(self, process, self.clock, self.pulse)

    def emit(self, event: AnyEvent) -> None:
        if len(self._events) >= self._capacity:
            self._num_lost += 1
        else:
            self._events.append(event)

    def take(self) -> EventBatch:
        """Remove and return the oldest events, at most `BATCH`."""
        count = min(BATCH, len(self._events))
        lost, self._num_lost = self._num_lost, 0
        events = tuple(self._events.popleft() for _ in range(count))
        return EventBatch(now=self.clock.time(), events=events, num_lost=lost, pulse=self.pulse.report())
