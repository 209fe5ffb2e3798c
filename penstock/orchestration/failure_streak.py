"""Failure that repeats: when group after group fails, a run has stopped learning, and goes on for ever if nobody
ends it."""

from collections import Counter

from penstock.errors import UserError

STEPS, AT_LEAST = 4, 16
"""Without a setting: this many steps' worth of groups, but not fewer than this many groups."""
LOOK_AT = {
    "score_error": "look at the reward function, or at what its tasks' columns hold",
    "score_timeout": "raise reward.timeout_s, or make the reward quicker",
    "score_nan": "look at the reward function: it must return finite numbers",
    "score_shape": "look at the reward function: it must return a number for each completion",
    "refused": "look at engine.max_context, and whether tokenizer and model belong together",
    "lost_blob": "look at the space left in /dev/shm",
}


class FailureStreak:
    """Counts groups that failed in a row. Drops for staleness or by selection are none of its business."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: Counter[str] = Counter()

    def good(self) -> None:
        self._reasons.clear()

    def failed(self, reason: str, message: str) -> UserError | None:
        """What ends the run, when this failure is one too many. The message is that of the last failure."""
        self._reasons[reason] += 1
        if self._reasons.total() < self._limit:
            return None
        (most, count), total = self._reasons.most_common(1)[0], self._reasons.total()
        why = most if count == total else ", ".join(f"{n} {r}" for r, n in self._reasons.most_common())
        look = LOOK_AT.get(most, "look at the logs in the run folder")
        return UserError(f"the last {total} groups all failed ({why}), the last one with: {message}; {look}")


def limit_of(setting: int, groups_per_step: int) -> int:
    """How many failures in a row end a run; a setting of 0 leaves it to us."""
    return setting or max(AT_LEAST, STEPS * groups_per_step)
