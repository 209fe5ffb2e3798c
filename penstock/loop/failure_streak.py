"""Ends a run in which group after group fails: it has stopped learning and would never end by itself."""

from collections import Counter, deque

from penstock.errors import UserError

STEPS, AT_LEAST = 4, 16
"""The default limit: this many steps' worth of groups, at least this many groups, and more than can be under way at
once, so that one passing cause can't reach it."""
WATCHED, TOO_MANY = 64, 0.25
"""A warning is logged when this share of the last so many groups failed."""
LOOK_AT = {
    "score_error": "look at the reward function, or at what its tasks' columns hold",
    "score_unavailable": "look at what the reward function connects to, and at reward.retries",
    "score_timeout": "raise reward.timeout_s, or make the reward quicker",
    "score_too_large": "make episodes shorter (rollout.max_new_tokens), or score each by itself",
    "score_nan": "look at the reward function: it must return finite numbers",
    "score_shape": "look at the reward function: it must return a number for each completion",
    "refused": "look at engine.max_context, and whether tokenizer and model belong together",
    "failed_episodes": "look at the workflow: `penstock samples RUN` has what each failed episode said",
    "workflow_unavailable": "look at what the workflow connects to, and at rollout.retries",
    "lost_blob": "look at the space left in /dev/shm",
}


class FailureStreak:
    """Counts groups that failed in a row, and how many of the last ones did. Drops for staleness or by selection
    do not count."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: Counter[str] = Counter()
        self._last: deque[str] = deque(maxlen=WATCHED)
        """Why each of the last groups failed; "" for a good one."""
        self._until_warning = WATCHED

    def good(self) -> None:
        self._reasons.clear()
        self._note("")

    def rate_words(self) -> str | None:
        """Return a warning when many of the last groups failed, at most once per window of groups."""
        failed = Counter(reason for reason in self._last if reason)
        if self._until_warning > 0 or failed.total() < TOO_MANY * WATCHED:
            return None
        self._until_warning = WATCHED
        most, _ = failed.most_common(1)[0]
        why = ", ".join(f"{count} {reason}" for reason, count in failed.most_common())
        look = LOOK_AT.get(most, "look at the logs in the run folder")
        return f"{failed.total()} of the last {WATCHED} groups failed ({why}); {look}"

    def _note(self, reason: str) -> None:
        self._last.append(reason)
        self._until_warning -= 1

    def failed(self, reason: str, message: str) -> UserError | None:
        """Count a failure. Returns the error that ends the run once the limit is reached, and None before."""
        self._reasons[reason] += 1
        self._note(reason)
        if self._reasons.total() < self._limit:
            return None
        (most, count), total = self._reasons.most_common(1)[0], self._reasons.total()
        why = most if count == total else ", ".join(f"{n} {r}" for r, n in self._reasons.most_common())
        look = LOOK_AT.get(most, "look at the logs in the run folder")
        return UserError(f"the last {total} groups all failed ({why}), the last one with: {message}; {look}")


def limit_of(setting: int, groups_per_step: int, max_staleness: int) -> int:
    """Return how many failures in a row end a run; 0 means the default of this module."""
    return setting or max(AT_LEAST, STEPS * groups_per_step, (max_staleness + 1) * groups_per_step + 1)
