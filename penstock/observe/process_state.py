"""Folds the events of one process into its state."""

from collections.abc import Mapping

from penstock.observe.usage import Meter, busy_seconds


class ProcessState:
    """Keeps what the process does now, its newest counters, and how much it worked in all and while the run
    trained."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.doing = ""
        self.counters: dict[str, float] = {}
        self.busy = Meter()
        self.tokens = Meter()
        self.busy_training_s = 0.0
        self.tokens_training = 0.0
        self._before: tuple[float, float] | None = None

    @property
    def is_engine(self) -> bool:
        return "tokens" in self.counters

    def count(self, time: float, values: Mapping[str, float]) -> None:
        self.counters.update(values)
        if "busy_s" in values:
            self.busy.read(time, values["busy_s"])
        if "tokens" in values:
            self.tokens.read(time, values["tokens"])

    def work(self, time: float, parts: Mapping[str, float]) -> None:
        """Add the busy time of one trainer step, given the seconds of its parts."""
        self.busy.add(time, busy_seconds(parts))

    def begin_training(self, time: float) -> None:
        self._before = (self.busy.total, self.tokens.total)
        self.busy.add(time, 0.0)

    def end_training(self) -> None:
        busy, tokens = self._before or (0.0, 0.0)
        self.busy_training_s += self.busy.total - busy
        self.tokens_training += self.tokens.total - tokens
        self._before = None
