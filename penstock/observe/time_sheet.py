"""Splits the time in which the run trained by what the trainer and each engine did. The parts add up to the whole.

The trainer works in forward, backward and optimizer (`penstock.observe.usage`); copies weights (`sync`); does what
else a step needs (`rest of the step`: packing, metrics, sending plans, making records durable); waits for groups,
split by what the last of them was doing (`wait: …`); and is between two steps (`between steps`: checkpoints, or no
trainer).

An engine runs forward passes (`work`); is paused for new weights (`sync`); has no requests, split by what keeps
groups from being admitted (`idle: …`); and has requests but runs no pass (`between passes`).

The summary and the page add these up to three: worked, waited (for groups, or for requests), and other.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.observe.events import AnyEvent, Counters, PhaseEvent, RunEvent, StepEvent, UpdateEvent
from penstock.observe.usage import busy_seconds

TRAINER, CONTROLLER = "trainer", "controller"
CAUSES = {
    "bound": "idle: the bound is reached",
    "stock": "idle: groups wait for the trainer",
    "lag": "idle: waits for new weights",
    "": "idle: tools and rewards run",
}
"""What an engine without requests waits for, by what blocks admission; "": nothing blocks it."""
SUMS = ("worked", "waited", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTime:
    """Splits a process's time while the run trained; `parts` add up to `total_s`."""

    process: str
    total_s: float
    parts: dict[str, float]

    @property
    def shares(self) -> dict[str, float]:
        return {name: seconds / self.total_s for name, seconds in self.parts.items()} if self.total_s else {}

    @property
    def waits(self) -> dict[str, float]:
        """Return the shares of time in which it had nothing to do, by cause."""
        return {name: share for name, share in self.shares.items() if name.startswith(("wait: ", "idle: "))}

    @property
    def sums(self) -> dict[str, float]:
        """Return the shares of time in which it worked, waited and did other things."""
        worked, waited = self.shares.get("work", 0.0), sum(self.waits.values())
        other = max(0.0, sum(self.shares.values()) - worked - waited)
        return dict(zip(SUMS, (worked, waited, other), strict=True))


class EngineTime:
    """Adds up one engine's busy and idle time while the run trains."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.idle_s: defaultdict[str, float] = defaultdict(float)
        self._reading = 0.0
        self._time: float | None = None

    def read(
        self, time: float, values: Mapping[str, float], causes: Mapping[str, float], since: float | None
    ) -> None:
        """Take an engine's counters. `causes` are shares of the time since the last reading, by what blocked
        admission. Only time after `since` counts; None: the run is not training."""
        before, self._reading = self._reading, values["busy_s"]
        last, self._time = self._time, time
        if last is None or since is None or time <= since:
            return
        length = time - max(last, since)
        # A restarted process counts from zero.
        busy = self._reading - before if self._reading >= before else self._reading
        self.busy_s += busy * length / (time - last) if time > last else busy
        if not values.get("running", 0) + values.get("waiting", 0):
            for cause, share in causes.items():
                self.idle_s[cause] += share * length


class TimeSheet:
    """Adds up, from a run's events, what the trainer and each engine did while the run trained."""

    def __init__(self) -> None:
        self._trainer: defaultdict[str, float] = defaultdict(float)
        self._engines: dict[str, EngineTime] = {}
        self._stall_s = 0.0
        self._training_s = 0.0
        self._since: float | None = None
        self._now = 0.0
        self._blocked: dict[str, float] = {}
        self._causes: dict[str, float] = {"": 1.0}
        self._looked: float | None = None

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, RunEvent):
            self._end(self._now)  # a session that was killed trained until its last event
        self._now = max(self._now, event.time)
        match event:
            case PhaseEvent():
                self._end(event.time)
                self._since = event.time if event.phase == "training" else None
            case StepEvent():
                self._on_step(event)
            case UpdateEvent() if self._since is not None:
                self._stall_s += event.stall_s
            case Counters() if event.process == CONTROLLER:
                if event.values:  # an event without values is a heartbeat
                    self._on_controller(event)
            case Counters() if "busy_s" in event.values:
                engine = self._engines.setdefault(event.process, EngineTime())
                engine.read(event.time, event.values, self._causes, self._since)

    @property
    def training_s(self) -> float:
        return self._training_s + (0.0 if self._since is None else self._now - self._since)

    def processes(self) -> list[ProcessTime]:
        """Return the trainer's time, then the engines'. Empty before training has begun."""
        total = self.training_s
        if total <= 0:
            return []
        return [
            self._trainer_time(total),
            *(self._engine_time(name, engine, total) for name, engine in sorted(self._engines.items())),
        ]

    def sums(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the trainer's shares of time that it worked, waited and did other things, and the mean of the
        engines' shares."""
        found = [one.sums for one in self.processes()]
        trainer = found[0] if found else dict.fromkeys(SUMS, 0.0)
        engines = found[1:]
        return trainer, {name: sum(one[name] for one in engines) / max(1, len(engines)) for name in SUMS}

    def _trainer_time(self, total: float) -> ProcessTime:
        parts = fitted(self._trainer, total)
        parts["between steps"] = max(0.0, total - sum(parts.values()))
        return ProcessTime(process=TRAINER, total_s=total, parts=parts)

    def _engine_time(self, name: str, engine: EngineTime, total: float) -> ProcessTime:
        work = min(engine.busy_s, total)
        sync = min(self._stall_s, total - work)
        idle = fitted(
            {CAUSES[cause]: seconds for cause, seconds in engine.idle_s.items()}, total - work - sync
        )
        parts = {"work": work, "sync": sync, **idle}
        parts["between passes"] = max(0.0, total - sum(parts.values()))
        return ProcessTime(process=name, total_s=total, parts=parts)

    def _end(self, time: float) -> None:
        if self._since is not None:
            self._training_s += time - self._since
            self._since = None

    def _on_step(self, event: StepEvent) -> None:
        work, sync = busy_seconds(event.seconds), event.seconds.get("snapshot", 0.0)
        self._trainer["work"] += work
        self._trainer["sync"] += sync
        self._trainer["rest of the step"] += max(0.0, event.took_s - work - sync)
        for cause, seconds in (event.waits or {"groups": event.waited_s}).items():
            self._trainer[f"wait: {cause}"] += seconds

    def _on_controller(self, event: Counters) -> None:
        """Compute which share of the time each cause has blocked admission since the last report."""
        blocked = {cause: event.values.get(f"blocked_{cause}_s", 0.0) for cause in CAUSES if cause}
        if self._looked is not None and event.time > self._looked:
            length = event.time - self._looked
            shares = {
                cause: min(1.0, max(0.0, seconds - self._blocked.get(cause, 0.0)) / length)
                for cause, seconds in blocked.items()
            }
            self._causes = {**shares, "": max(0.0, 1 - sum(shares.values()))}
        self._blocked, self._looked = blocked, event.time


def fitted(parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Scale measured parts down where their sum exceeds the total."""
    measured = sum(parts.values())
    scale = min(1.0, total / measured) if measured > 0 else 1.0
    return {name: seconds * scale for name, seconds in parts.items() if seconds > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    num_gpus: int
    gpu_hours: float
    """Counted from the beginning of every session to its end, whatever the GPUs did meanwhile."""
    tokens: float
    """Tokens that the engines generated in that time, evaluations included."""
    tokens_training: float
    """Those of them that were generated in the training phase, as the summary counts them."""
    tokens_per_gpu_hour: float | None
    """All of `tokens` by `gpu_hours`. None if the run uses no GPU."""
    price: float | None
    """None where `observe.gpu_hour_price` is not set."""


def cost_of(
    *, num_gpus: int, seconds: float, tokens: float, tokens_training: float, gpu_hour_price: float | None
) -> Cost:
    hours = num_gpus * seconds / 3600
    return Cost(
        num_gpus=num_gpus,
        gpu_hours=hours,
        tokens=tokens,
        tokens_training=tokens_training,
        tokens_per_gpu_hour=tokens / hours if hours > 0 else None,
        price=None if gpu_hour_price is None else hours * gpu_hour_price,
    )
