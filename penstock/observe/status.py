"""A run at one moment, as the views show it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """One process: how much of the last moments it worked, and what it does or waits for now."""

    name: str
    busy: float
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """Groups on their way to a step, by where they are."""

    generating: int
    scoring: int
    ready: int
    limit: int
    """How many may be under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStatus:
    """The answers of the last step."""

    tokens_mean: float
    tokens_max: float
    truncated: float
    """The share that ended at the token limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStatus:
    """Experts of the last step's tokens, where they were recorded: shares of (layer, token) choices. What is None
    can't be known, since nothing was replayed or no sequence was sampled."""

    replayed: float
    flipped: float | None
    """Of the replayed ones, those that the trainer's routers would have made otherwise."""
    gap: float | None
    """Mean difference between the engine's and the trainer's logprobs on a sample of tokens."""
    gap_without: float | None
    """The same without replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeStatus:
    """Of the tokens that the last step trained on: the share that is so many steps old."""

    first: int
    last: int | None
    """None: and older."""
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckStatus:
    """Who holds up the others, and how one sees that."""

    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStatus:
    """The newest answer that was scored."""

    reward: float
    text: str
    oldest_version: int | None
    newest_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    name: str
    phase: str
    elapsed_s: float = 0.0
    left_s: float | None = None
    """Until the last step, at the pace of the last ones; None where there is no pace yet, or no training."""
    step: int = 0
    steps: int
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    first_reward: float | None = None
    heldout: tuple[tuple[int, float], ...] = ()
    """(step, mean held-out reward) of every evaluation so far."""
    tokens_per_s: float = 0.0
    staleness_mean: float = 0.0
    """Of the last step."""
    staleness_max: float = 0.0
    """Of the whole run."""
    staleness_bound: int | None = None
    ages: tuple[AgeStatus, ...] = ()
    samples: int = 0
    drops: dict[str, int] = field(default_factory=dict)
    failed_checkpoints: tuple[int, int, str] | None = None
    """How many could not be written, the step of the last and why; None once one is written again."""
    processes: tuple[ProcessStatus, ...] = ()
    flow: FlowStatus | None = None
    bottleneck: BottleneckStatus | None = None
    answers: AnswerStatus | None = None
    experts: ExpertStatus | None = None
    own_metrics: dict[str, float] = field(default_factory=dict)
    """What a user's loss reported of the last step."""
    last_sample: SampleStatus | None = None
