"""Defines the events of a run: every stage emits these records, and every view, log and metric is made from them.

    controller, monitor ──────────────────► EventStream ─► RunState ─► terminal, summary.json
    engines, trainer, scorers ─► EventQueue ───────┘        └► metrics.jsonl, TensorBoard, wandb, trackio
                                                       └► EventStore: RUN/events, which page, report, trace and
                                                          `penstock view` read

`process` names the process in which it happened. `time` is in seconds of the controller's event loop, which is
`time.monotonic` in a real run (on Linux one clock for all processes of a machine) and jumps in a simulated one; a
`RunEvent` ties it to the wall clock. Events from another machine are shifted to this clock when they arrive
(`EventBatch`).

Tokens and forward passes have no events of their own: they happen too often, so `Counters` report sums. The tokens
of a few answers of each step are reported as columns (`TokensEvent`).

Events are written as arrays, by position: a new field goes to the end of its record and has a default.
"""

from typing import Any

import msgspec

from penstock.observe.pulse import PulseReport

Attribute = int | float | str
PREPARING = "starting: reading tasks and tokenizer"
LOADING = "starting: loading the model"
CONTEXT = "context"
"""The role of what a turn read."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Says when something happened, and in which process."""

    process: str
    time: float


class RunEvent(Event, frozen=True, kw_only=True):
    """Says what is known of a run, once when its preparation begins and again, with its folder, when its session
    begins. `wall_s` is the Unix time at `time`: later times follow from the difference."""

    name: str
    folder: str
    steps: int
    """Number of planned steps."""
    wall_s: float
    step: int = 0
    """Step of the checkpoint that the run resumes from."""
    heldout: tuple[tuple[int, float], ...] = ()
    """(step, mean held-out reward) of earlier evaluations."""


class ConfigEvent(Event, frozen=True, kw_only=True):
    """Records a session's config and how many GPUs it uses."""

    config: str
    """All sections as JSON, secrets hidden."""
    num_gpus: int = 0
    """GPUs that the run's processes use."""


class PhaseEvent(Event, frozen=True, kw_only=True):
    """The run enters a phase: `LOADING`, `verifying weights`, `evaluating`, `training`, `saving`, `done`. A run
    begins in `PREPARING`, without an event for that."""

    phase: str


class Span(Event, frozen=True, kw_only=True):
    """Records work or a wait that began at `start` and ended at `time`. Spans of one track never overlap, though
    one may contain another; concurrent work has a track each."""

    track: str
    name: str
    start: float
    attributes: dict[str, Attribute] = {}


class Counters(Event, frozen=True, kw_only=True):
    """Reports numbers of one process at one moment. Some only grow (`busy_s`, `tokens`), others rise and fall
    (`running`)."""

    values: dict[str, float]


class Doing(Event, frozen=True, kw_only=True):
    """Says in words what a process does or waits for from now on."""

    what: str


class Drop(Event, frozen=True, kw_only=True):
    """A group will not be trained. All counts of drops are counts of these events."""

    group: int
    task_id: str
    reason: str
    message: str
    age: int | None = None
    """How many steps its oldest token is behind; None where no token is known."""
    num_tokens: int = 0
    """Tokens that were sampled for nothing."""


class TurnText(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds what the model read or sampled in one turn. Special tokens are written out: roles, tool calls and
    results appear as in the chat template."""

    turn: int
    """Which turn of its episode, from 0."""
    role: str
    """`context` (tokens that were read) or `model` (tokens that were sampled). A turn of an agent or of
    another policy has its name instead of `model`."""
    text: str
    after: int | None = None
    """The earlier turn whose context and output this context continues. None: the text is the whole context."""

    @property
    def label(self) -> str:
        """Return a heading such as `turn 3: context after turn 1`. It ends before `after` where a context
        follows the turn before."""
        begins = ""
        if self.role == CONTEXT and self.turn and self.after != self.turn - 1:
            begins = " from the beginning" if self.after is None else f" after turn {self.after + 1}"
        return f"turn {self.turn + 1}: {self.role}{begins}"


class SampleEvent(Event, frozen=True, kw_only=True):
    """Describes one episode of a group that was trained in `step`, or dropped for the reason `drop`. Texts are
    shortened."""

    group: int
    episode: int
    task_id: str
    step: int | None = None
    drop: str | None = None
    failure: str | None = None
    """Why the episode itself failed; None when it did not. All counts of failed episodes are counts of these."""
    message: str = ""
    """Error message of the failure."""
    reward: float | None = None
    parts: dict[str, float] = {}
    advantage: float | None = None
    """The advantage of its tokens. None where each token has its own (`gae`, scores of steps), and where nothing
    was trained."""
    oldest_version: int | None = None
    newest_version: int | None = None
    num_turns: int
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    prompt: str
    answer: str
    age: int | None = None
    """How many steps its oldest token was behind when it was trained or dropped."""
    traced: bool = False
    """Whether a `TokensEvent` lists its tokens."""
    text_kept: bool = True
    """Whether its texts are still stored: old texts of a long run are deleted to make room for newer ones."""
    turns: tuple[TurnText, ...] = ()
    """What was read and sampled in each turn, where there are several."""
    extra: dict[str, str] = {}
    """Texts that a reward has given, by name."""


class TokensEvent(Event, frozen=True, kw_only=True):
    """Lists every token of a trained sample as columns: little-endian arrays with one value a token. The
    trainer's columns (`gaps` and those after it) hold loss tokens only, in order."""

    step: int
    group: int
    episode: int
    sample: int
    """Which of the episode's samples, from 0."""
    token_ids: bytes
    """int32"""
    versions: bytes
    """int32; -1 where the policy did not sample."""
    ages: bytes
    """int32: steps between the weights that sampled a token and those that were trained; -1 where the policy did
    not sample."""
    loss_mask: bytes
    """uint8"""
    logprobs: bytes
    """float32, as the engine recorded them; 0 where the policy did not sample."""
    gaps: bytes = b""
    """float32: the trainer's logprob minus the engine's."""
    advantages: bytes = b""
    """float32"""
    weights: bytes = b""
    """float32: what corrections made of the token; 0 takes it out of the loss."""
    clipped: bytes = b""
    """uint8; empty where the loss does not clip."""


class TokenTexts(Event, frozen=True, kw_only=True):
    """Gives the text of token ids that no earlier event has given."""

    texts: dict[int, str]


class StalenessEvent(Event, frozen=True, kw_only=True):
    """Reports how old the tokens of a step were. A token ages, counted in steps, while its group is generated
    (until the last episode ends) and while the group waits for its score and its step."""

    step: int
    tokens: tuple[tuple[int, int, int], ...]
    """(steps while generating, steps while waiting, loss tokens)"""
    groups: tuple[tuple[int, int], ...]
    """(age of the oldest token, groups)"""


class StepEvent(Event, frozen=True, kw_only=True):
    """Reports a finished optimizer step, with the metrics of all ranks merged."""

    step: int
    reward: float
    num_samples: int
    metrics: dict[str, float]
    own_metrics: tuple[str, ...] = ()
    """Names of the metrics that a user's loss reports."""
    seconds: dict[str, float]
    """The trainer's time, by part of the step."""
    waited_s: float
    took_s: float
    max_staleness: int
    groups: tuple[int, ...] = ()
    """Numbers of the groups trained in this step."""
    waits: dict[str, float] = {}
    """`waited_s`, split by what the group that ended the wait was doing meanwhile."""


class UpdateEvent(Event, frozen=True, kw_only=True):
    """Every engine of the pool serves this version. Times are the longest of any engine, token counts are sums."""

    policy: str
    version: int
    snapshot_s: float = 0.0
    """How long the trainer took to copy its weights, which is all that its step waits for."""
    publish_s: float = 0.0
    """How long the trainer hashed and described them, beside its next step."""
    stage_s: float
    """How long an engine fetched them, beside generation."""
    stall_s: float
    """How long no forward pass could run."""
    verify_s: float
    """How long the engine's fingerprint took."""
    fresh_s: float = 0.0
    """From the end of the step until every engine serves its weights."""
    drain_s: float = 0.0
    """Under `drain`: how long new requests waited."""
    recomputed_tokens: int = 0
    discarded_tokens: int = 0
    num_bytes: int = 0
    """Bytes that were sent."""
    num_skipped: int = 0
    """Versions since the last update that were never sent because newer ones replaced them."""
    step: int | None = None
    """The step that made these weights."""

    @property
    def transfer_s(self) -> float:
        """Return the time from the snapshot until the engines are ready to load."""
        return self.publish_s + self.stage_s


class EvaluationEvent(Event, frozen=True, kw_only=True):
    """Reports the mean held-out reward, measured at `step` or beside the steps after it."""

    step: int
    reward: float
    num_episodes: int
    num_failed: int


class CheckpointEvent(Event, frozen=True, kw_only=True):
    """The checkpoint of a step is durable, or could not be written. Steps continued meanwhile."""

    step: int
    write_s: float = 0.0
    num_bytes: int = 0
    failure: str = ""
    """Why it could not be written."""


class RecoveryEvent(Event, frozen=True, kw_only=True):
    """A lost worker works again."""

    worker: str
    incarnation: int
    """Which process of this name works now, counted from the first."""
    cause: str
    """Why the worker was lost."""
    took_s: float
    """Seconds from noticing the loss until it works again."""


class LogLine(Event, frozen=True, kw_only=True):
    """Carries a sentence for the person who watches."""

    line: str


AnyEvent = (
    RunEvent
    | ConfigEvent
    | PhaseEvent
    | Span
    | Counters
    | Doing
    | Drop
    | SampleEvent
    | TokensEvent
    | TokenTexts
    | StalenessEvent
    | StepEvent
    | UpdateEvent
    | EvaluationEvent
    | CheckpointEvent
    | RecoveryEvent
    | LogLine
)


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Carries a worker process's events to the controller. `now` is the worker's clock when it answers."""

    now: float
    events: tuple[AnyEvent, ...]
    num_lost: int = 0
    """Events since the last batch for which there was no room."""
    pulse: PulseReport = PulseReport()
    """Liveness of the worker."""


def as_fields(event: AnyEvent) -> dict[str, Any]:
    """Return an event's fields by name, as a line of JSON has them."""
    return {"type": type(event).__name__, **msgspec.structs.asdict(event)}


def shifted(event: AnyEvent, offset_s: float) -> AnyEvent:
    """Return the same event on a clock that is `offset_s` ahead."""
    if isinstance(event, Span):
        return msgspec.structs.replace(event, time=event.time + offset_s, start=event.start + offset_s)
    return msgspec.structs.replace(event, time=event.time + offset_s)
