"""When a worker counts as frozen: it does not answer, or its work has not moved, for longer than it said that may
take. A rule without processes; the answers come from `EventCollector`."""

from dataclasses import dataclass

from penstock.observe.pulse import PulseReport

STEP_S = 0.5
"""Between two looks."""


@dataclass(slots=True)
class Silence:
    """What is known of one process. Time in which the watcher itself stood still is nobody's silence."""

    freeze_s: float
    """What is always allowed."""
    heard_at: float
    report: PulseReport
    _looked_at: float | None = None

    def hear(self, now: float, report: PulseReport) -> None:
        self.heard_at, self.report = now, report

    def look(self, now: float) -> str | None:
        """Why it counts as frozen; None while it does not."""
        if self._looked_at is not None and now - self._looked_at > 2 * STEP_S:
            self.heard_at += now - self._looked_at - STEP_S
        self._looked_at = now
        report, silent_s = self.report, now - self.heard_at
        answers_s = max(self.freeze_s, report.longest_silence_s)
        if silent_s > answers_s:
            return f"it has not answered for {silent_s:.0f} s ({report.phase}), {answers_s:.0f} s are allowed"
        allowed_s = max(self.freeze_s, report.limit_s)
        if report.limit_s and report.quiet_s + silent_s > allowed_s:
            return (
                f"its work ({report.phase}) has not moved for {report.quiet_s + silent_s:.0f} s, {allowed_s:.0f} s "
                "are allowed"
            )
        return None
