"""Reports a worker's liveness: what it is doing, for how long without progress, and how long that may take.

A worker declares each phase of its work with a limit: compiling may take half an hour, a step a few times as
long as the longest so far. The controller ends a worker that is past its limit, or that does not answer at
all for longer than its last report allows.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from penstock.records.interfaces import Clock

LONG_S = 1800.0
"""For loading, compiling and writing, whose time cannot be known in advance."""


class PulseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the phase or loop that is nearest to its limit."""

    phase: str = "waiting for work"
    quiet_s: float = 0.0
    """Seconds since the phase began, or since the loop last advanced."""
    limit_s: float = 0.0
    """How long `quiet_s` may get. The watching process may allow more, never less."""
    silent_s: float | None = None
    """How long the process may fail to answer at all; None: as long as `limit_s`."""

    @property
    def longest_silence_s(self) -> float:
        return self.limit_s if self.silent_s is None else self.silent_s

    @property
    def left_s(self) -> float:
        return self.limit_s - self.quiet_s


class Pulse:
    """Tracks the phases and loops of one process. Phases may overlap, and any thread may enter one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._phases: dict[int, tuple[str, float, float]] = {}
        """Name, limit and start of each phase under way."""
        self._loops: list[_Loop] = []
        self._last = 0
        self._changing = threading.Lock()

    def watch(self, name: str, progress: Callable[[], float | None], limit_s: float) -> None:
        """Watch a loop that runs for the life of the process. `progress` returns a different number whenever the
        loop has advanced, and None while it has nothing to do."""
        self._loops.append(_Loop(name, progress, limit_s))

    @contextmanager
    def phase(self, name: str, limit_s: float) -> Iterator[None]:
        """Declare work of this kind, which must end within `limit_s`."""
        with self._changing:
            self._last += 1
            number = self._last
            self._phases[number] = (name, limit_s, self._clock.time())
        try:
            yield
        finally:
            with self._changing:
                del self._phases[number]

    def report(self) -> PulseReport:
        now = self._clock.time()
        with self._changing:
            phases = list(self._phases.values())
        reports = (
            PulseReport(phase=name, quiet_s=now - beat, limit_s=limit_s) for name, limit_s, beat in phases
        )
        phase = min(reports, key=lambda report: report.left_s, default=None)
        loops = (report for loop in self._loops if (report := loop.look(now)) is not None)
        loop = min(loops, key=lambda report: report.left_s, default=None)
        if loop is None:
            return phase or PulseReport()
        if phase is not None and phase.left_s <= loop.left_s:
            return phase
        # A loop works in a thread, so its process answers however long one round takes.
        return msgspec.structs.replace(loop, silent_s=0.0 if phase is None else phase.limit_s)


class _Loop:
    """Remembers when a watched loop was last seen to advance."""

    def __init__(self, name: str, progress: Callable[[], float | None], limit_s: float) -> None:
        self._name = name
        self._progress = progress
        self._limit_s = limit_s
        self._seen: tuple[float, float] | None = None

    def look(self, now: float) -> PulseReport | None:
        """Return the loop's report, or None while it has nothing to do."""
        progress = self._progress()
        if progress is None:
            self._seen = None
            return None
        if self._seen is None or self._seen[0] != progress:
            self._seen = (progress, now)
        return PulseReport(phase=self._name, quiet_s=now - self._seen[1], limit_s=self._limit_s)
