"""Folds the events of one process into its state."""

from collections.abc import Mapping

from penstock.observe.usage import Meter, busy_seconds


class ProcessState:
    """Keeps what the process does now, its newest counters, how much it worked, and its tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.doing = ""
        self.counters: dict[str, float] = {}
        self.busy = Meter()
        self.tokens = Meter()
        self.tokens_training = 0.0
        """How many of its tokens it generated while the run trained."""

    @property
    def is_engine(self) -> bool:
        return "tokens" in self.counters

    def count(self, time: float, values: Mapping[str, float], *, trains: bool) -> None:
        """Take new counters. `trains`: the run was training since the last ones."""
        self.counters.update(values)
        if "busy_s" in values:
            self.busy.read(time, values["busy_s"])
        if "tokens" in values:
            before = self.tokens.total
            self.tokens.read(time, values["tokens"])
            if trains:
                self.tokens_training += self.tokens.total - before

    def work(self, time: float, parts: Mapping[str, float]) -> None:
        """Add the busy time of one trainer step, given the seconds of its parts."""
        self.busy.add(time, busy_seconds(parts))
