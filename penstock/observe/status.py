"""Describes a run at one moment, as the views show it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """Says how much of the last seconds a process worked, and what it does or waits for now."""

    name: str
    busy: float
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """Counts groups on their way to a step, by stage."""

    generating: int
    scoring: int
    ready: int
    limit: int
    """How many groups may be under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStatus:
    """Describes the answers of the last step."""

    tokens_mean: float
    tokens_max: float
    truncated: float
    """Share of answers that ended at the token limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStatus:
    """Compares the experts that the engine recorded in the last step with the trainer's. Shares are of (layer,
    token) choices. None means unknown: nothing was replayed, or no sequence was sampled."""

    replayed: float
    flipped: float | None
    """Share of the replayed choices that the trainer's routers would have made differently."""
    gap: float | None
    """Mean difference between the engine's and the trainer's logprobs on a sample of tokens."""
    gap_without: float | None
    """The same difference without replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeStatus:
    """Gives the share of the last step's tokens aged `first` to `last` steps."""

    first: int
    last: int | None
    """None: no upper limit."""
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckStatus:
    """Names the part that holds up the others, and how that shows."""

    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStatus:
    """Describes the newest answer that was scored."""

    reward: float
    prompt: str
    text: str
    oldest_version: int | None
    newest_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    name: str
    phase: str
    elapsed_s: float = 0.0
    left_s: float | None = None
    """Seconds until the last step, at the pace of recent steps; None where there is no pace yet, or no training."""
    step: int = 0
    steps: int
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    first_reward: float | None = None
    heldout: tuple[tuple[int, float], ...] = ()
    """(step, mean held-out reward) of every evaluation so far."""
    tokens_per_s: float = 0.0
    staleness_mean: float = 0.0
    """Mean age of the last step's tokens."""
    staleness_max: float = 0.0
    """The highest age of a token so far."""
    staleness_bound: int | None = None
    ages: tuple[AgeStatus, ...] = ()
    samples: int = 0
    drops: dict[str, int] = field(default_factory=dict)
    failed_checkpoints: tuple[int, int, str] | None = None
    """How many checkpoints failed, the step of the last one, and why; None once one is written again."""
    processes: tuple[ProcessStatus, ...] = ()
    flow: FlowStatus | None = None
    bottleneck: BottleneckStatus | None = None
    answers: AnswerStatus | None = None
    experts: ExpertStatus | None = None
    own_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step that a user's loss reports."""
    last_sample: SampleStatus | None = None


STEPS, LOOKS = 8, 20
"""How many steps and engine reports the bottleneck is found from: the last seconds, not the last moment."""
REPORTED_SHARE = 0.1
"""Share of time from which on waiting is reported."""
BUSY_SHARE = 0.7
"""If engines have work in at least this share of their reports, the trainer waits for them."""


class Bottleneck:
    """Finds what limits a run from the times of its steps and the counters of its engines and groups."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self._has_work: deque[bool] = deque(maxlen=LOOKS)
        self._generating: deque[float] = deque(maxlen=LOOKS)
        self._scoring: deque[float] = deque(maxlen=LOOKS)

    def on_step(self, waited_s: float, took_s: float) -> None:
        self._steps.append((waited_s, took_s))

    def on_counters(self, counters: Mapping[str, float]) -> None:
        """Take an engine's request counts, or the controller's counts of groups that are generating or scoring."""
        if "running" in counters:
            self._has_work.append(counters["running"] + counters["waiting"] > 0)
        if "generating" in counters:
            self._generating.append(counters["generating"])
            self._scoring.append(counters["scoring"])

    def status(self, *, engines_work: float, max_staleness: int | None) -> BottleneckStatus | None:
        """Return what limits the run. Return None until there is enough to judge: half of `STEPS`, or one step
        and `LOOKS` engine reports."""
        if len(self._steps) < STEPS // 2 and not (self._steps and len(self._has_work) == LOOKS):
            return None
        waited = sum(waited for waited, _ in self._steps)
        share = waited / max(1e-9, waited + sum(took for _, took in self._steps))
        if share < REPORTED_SHARE:
            if engines_work > 1 - REPORTED_SHARE:
                return BottleneckStatus(who="none", why="trainer and engines are both busy")
            return BottleneckStatus(
                who="trainer", why=f"it hardly waits, engines work {engines_work:.0%} of the time"
            )
        if sum(self._has_work) >= BUSY_SHARE * len(self._has_work):
            return BottleneckStatus(who="engines", why=f"trainer waits for groups {share:.0%} of the time")
        return BottleneckStatus(
            who=self._outside(max_staleness),
            why=f"trainer waits {share:.0%} of the time, engines work {engines_work:.0%}",
        )

    def _outside(self, max_staleness: int | None) -> str:
        """Return what the trainer waits for while engines have nothing to do."""
        generating, scoring = sum(self._generating), sum(self._scoring)
        if scoring > generating:
            return "rewards"
        if max_staleness == 0:
            return "staleness bound 0"
        return "episodes" if generating else "weight sync"
