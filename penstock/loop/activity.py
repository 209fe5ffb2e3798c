"""Says what a run is doing right now, for the terminal view and the watchdog."""

from dataclasses import dataclass, field

from penstock.loop.attempts import Attempt, Attempts, AttemptState


@dataclass(slots=True)
class Activity:
    """Holds what the trainer does, and reads the groups under way from the log's attempts."""

    attempts: Attempts = field(default_factory=Attempts)
    trainer: str = "starting"
    syncing_version: int | None = None

    @property
    def generating(self) -> list[Attempt]:
        """Return the groups whose episodes are under way. Those from before a restart count once they are
        resumed."""
        return [one for one in self._begun() if one.state != AttemptState.GENERATED]

    @property
    def scoring(self) -> list[Attempt]:
        return [one for one in self._begun() if one.state == AttemptState.GENERATED]

    def oldest_words(self, now: float) -> str:
        """Say which group under way has been in its stage for longest."""
        oldest = min(self._begun(), key=_since, default=None)
        if oldest is None:
            return "no group is under way"
        stage = "generation" if oldest.generated_s is None else "scoring"
        return (
            f"the oldest is group {oldest.ticket.number} (task {oldest.task_id!r}), in {stage} for "
            f"{now - _since(oldest):.0f} s"
        )

    def _begun(self) -> list[Attempt]:
        return [one for one in self.attempts.under_way.values() if one.began_s is not None]


def _since(attempt: Attempt) -> float:
    assert attempt.began_s is not None
    return attempt.began_s if attempt.generated_s is None else attempt.generated_s
