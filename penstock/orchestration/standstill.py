"""When a stage of the run stands still although it has work, and what is said then. A rule without processes."""

from collections.abc import Mapping
from dataclasses import dataclass

USUAL_CAUSES = {
    "generation": "long answers, a workflow or tool that hangs (rollout.timeout_s), or an engine that stands still",
    "scoring": "a reward or judge that hangs (reward.timeout_s), or too few of them (reward.workers)",
    "training": "a first step that compiles, a machine that swaps, or a disk without room for the step's groups",
    "weight sync": "an engine that takes no weights (its log says more), or a slow way to it (sync.transport)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One stage at one moment."""

    work: int
    """What it has to do: groups, steps, updates."""
    progress: float
    """A number that changes whenever it gets on."""


class StageWatch:
    """Tells stages that had work and did not move for `limit_s`, each again after as long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._marks: dict[str, tuple[float, float]] = {}
        """By stage: its progress, and when that was last another, or it had no work, or it was told."""

    def look(self, now: float, marks: Mapping[str, Mark]) -> list[tuple[str, float]]:
        """The stages to tell of, with how long each has stood."""
        standing = []
        for stage, mark in marks.items():
            progress, since = self._marks.get(stage, (mark.progress, now))
            if not mark.work or progress != mark.progress:
                since = now
            elif now - since > self._limit_s:
                standing.append((stage, now - since))
                since = now
            self._marks[stage] = (mark.progress, since)
        return standing
