"""When a worker that died is started again, and when that is given up: a rule without a clock or processes."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The first death is answered at once; those that follow soon wait, each twice as long, until there are too
    many."""

    first_s: float = 1.0
    """Before the second start in a row."""
    longest_s: float = 30.0
    max_deaths: int = 5
    """In a row: the last of them is not answered."""
    healthy_s: float = 60.0
    """A worker that has lived this long since it came back begins a new row."""

    def wait_s(self, num_deaths: int) -> float:
        """How long to wait before the start that follows so many deaths in a row."""
        return 0.0 if num_deaths < 2 else min(self.longest_s, self.first_s * 2.0 ** (num_deaths - 2))


@dataclass(slots=True)
class Deaths:
    """The deaths of one worker."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    count: int = 0
    """In a row."""
    _back_at: float | None = None
    """When it came back after the last of them; None while it has not."""

    def note(self, now: float) -> float | None:
        """It died: how long to wait before it is started again; None gives it up."""
        if self._back_at is not None and now - self._back_at >= self.policy.healthy_s:
            self.count = 0
        self._back_at = None
        self.count += 1
        if self.count >= self.policy.max_deaths:
            return None
        return self.policy.wait_s(self.count)

    def back(self, now: float) -> None:
        """It works again."""
        self._back_at = now
