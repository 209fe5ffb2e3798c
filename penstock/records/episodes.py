"""Tasks, and what attempts at them are made of: turns, episodes, groups, and samples to train on."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.records.base import (
    DEFAULT_POLICY,
    NOT_SAMPLED,
    BoolArray,
    FloatArray,
    IntArray,
    Record,
    check_aligned,
)
from penstock.records.blobs import MaskRef, RoutingRef, check_masks, check_routes, routes_within
from penstock.records.generation import FinishReason, SamplingParams


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message."""

    role: str
    """Who speaks: `system`, `user`, `assistant`, or what else the chat template knows."""
    content: str
    """What is said."""


class Task(Record, frozen=True, kw_only=True):
    """One dataset item: a prompt, and the columns its environment or reward needs."""

    id: str
    """Unique among the tasks of a run."""
    prompt: str | tuple[Message, ...]
    """Text, or chat messages."""
    columns: dict[str, Any] = {}
    """The other columns of its row, for the reward and the workflow."""
    workflow: str | None = None
    """The path of the task's own workflow; None takes the run's."""

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is chat messages."""
        return not isinstance(self.prompt, str)


class Turn(Record, frozen=True, kw_only=True):
    """One generation by one agent: the context it saw and what it sampled."""

    id: str = ""
    """The engine request that made it: group, episode and turn, as in `g12.3.0`."""
    parent: str | None = None
    """The id of the turn that it continues or forks from."""
    prompt_ids: IntArray
    """The context that it saw."""
    output_ids: IntArray
    """What was sampled after it."""
    logprobs: FloatArray
    """Of each sampled token, under the distribution that it was drawn from."""
    versions: IntArray
    """The version of the policy that sampled each token."""
    mixed: BoolArray | None = None
    """Of each, whether keys and values of older weights were read when it was sampled; None where the engine can't
    say."""
    finish_reason: FinishReason
    """`stop` (a stop token or string), `length` (at the token limit) or `cancelled`."""
    sampling: SamplingParams
    """How its tokens were drawn."""
    text: str
    """What was sampled, decoded."""
    policy: str = DEFAULT_POLICY
    """Whose weights sampled it."""
    agent: str = "agent"
    """Who speaks, where a workflow has several."""
    sampling_masks: tuple[MaskRef, ...] = ()
    """In order, of output tokens; a token that none covers was drawn from the whole vocabulary."""
    routing: tuple[RoutingRef, ...] = ()
    """In order, the experts of its tokens, context and output. Of context that an earlier turn has recorded, these
    are that turn's. The last token has none, since nothing was computed from it."""

    def __post_init__(self) -> None:
        check_aligned("Turn", self.output_ids, self.logprobs, self.versions)
        if self.mixed is not None:
            check_aligned("Turn", self.output_ids, self.mixed)
        check_masks("Turn", self.sampling_masks, len(self.output_ids))
        check_routes("Turn", self.routing, len(self.prompt_ids) + len(self.output_ids))

    @property
    def token_ids(self) -> IntArray:
        """The context and what was sampled after it."""
        return np.concatenate([self.prompt_ids, self.output_ids]).astype(np.int32, copy=False)


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a sample the output of a turn lies. `turn` counts the turns of its episode from 0."""

    turn: int
    """Which turn."""
    start: int
    """Its first token in the sample."""
    end: int
    """One past its last."""


class Sample(Record, frozen=True, kw_only=True):
    """One flat token sequence, ready to train on. Arrays are aligned; `logprobs` are those of the
    distribution actually sampled from, and 0 where the policy did not sample."""

    token_ids: IntArray
    """Context and sampled tokens, in order."""
    loss_mask: BoolArray
    """Which tokens are trained on."""
    logprobs: FloatArray
    """Recorded when a token was sampled."""
    versions: IntArray
    """The version that sampled each token; -1 where none did."""
    mixed: BoolArray | None = None
    """Whether keys and values of older weights were read when a token was sampled, which the trainer does not
    compute. None: of every token behind one of another version."""
    sampling: SamplingParams
    """How its tokens were drawn."""
    policy: str = DEFAULT_POLICY
    """Whose weights are trained on it."""
    sampling_masks: tuple[MaskRef, ...] = ()
    """In order, those of all its turns; `start` counts the sample's tokens."""
    routing: tuple[RoutingRef, ...] = ()
    """In order, the experts of its tokens, each recorded when the token was first computed."""
    turns: tuple[TurnSpan, ...] = ()
    """Where its turns' outputs are, in order."""
    columns: dict[str, FloatArray] = {}
    """Named values per token for the loss (a teacher's logprobs, a process reward), aligned with `token_ids`; 0
    where a token has none, as context never has."""

    def __post_init__(self) -> None:
        check_aligned("Sample", self.token_ids, self.loss_mask, self.logprobs, self.versions)
        if self.mixed is not None:
            check_aligned("Sample", self.token_ids, self.mixed)
        check_masks("Sample", self.sampling_masks, len(self.token_ids))
        check_routes("Sample", self.routing, len(self.token_ids))
        for name, values in self.columns.items():
            check_aligned(f"Sample with its column {name!r}", self.token_ids, values)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(self.loss_mask.sum())

    def in_loss_where(self, keep: BoolArray) -> "Sample":
        """The same sample with only those of its loss tokens that `keep` marks."""
        return msgspec.structs.replace(self, loss_mask=self.loss_mask & keep)


class Episode(Record, frozen=True, kw_only=True):
    """One attempt at a task: the turns it made, oldest first. A failed attempt is data too."""

    task_id: str
    """The task that was attempted."""
    turns: tuple[Turn, ...]
    """Oldest first."""
    index: int = 0
    """Its place among the attempts of its group."""
    failure: str | None = None
    """Why it failed: "workflow_error", "workflow_unavailable", "timeout", "refused" or "worker_died"; None when it
    did not."""
    message: str = ""
    """What a failure said."""
    reward: float | None = None
    """What its own workflow or agent says it is worth; None where it says nothing. The reward functions `auto` and
    `episode` take it."""
    parts: dict[str, float] = {}
    """What that reward is made of, by name."""
    rewrites: dict[str, int] = {}
    """Turns that could not go on after the tokens of the turn before, since somebody had rewritten what was
    said: by `client` or by `template`."""
    unread_answers: int = 0
    """Answers that no client was there for to their end. Their turns are no part of the episode."""

    @property
    def text(self) -> str:
        """What the reward sees: the last turn's text."""
        return self.turns[-1].text if self.turns else ""

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(len(turn.output_ids) for turn in self.turns)

    def samples(self) -> tuple[Sample, ...]:
        """Its turns as samples, those that continue each other as one. Every sampled token is in the loss of
        exactly one sample; a failed episode has none."""
        return () if self.failure is not None else samples_of_turns(self.turns)


class Group(Record, frozen=True, kw_only=True):
    """The episodes of one task that are compared with each other: admitted, scored, buffered, dropped and
    trained as one. `number` is its place in the order of admission. Failed episodes are kept apart, so that
    nothing that is computed over `episodes` counts them."""

    number: int
    """Counted in the order of admission, from 0."""
    task: Task
    """What was attempted."""
    episodes: tuple[Episode, ...]
    """The good ones."""
    failures: tuple[Episode, ...] = ()
    """Those that failed."""

    @classmethod
    def of(cls, number: int, task: Task, episodes: Iterable[Episode]) -> "Group":
        """Episodes as they ended, the failed ones apart."""
        every = tuple(episodes)
        return cls(
            number=number,
            task=task,
            episodes=tuple(episode for episode in every if episode.failure is None),
            failures=tuple(episode for episode in every if episode.failure is not None),
        )


def sample_of_turn(turn: Turn) -> Sample:
    """A turn laid out flat: its prompt (not in the loss), then what was sampled (in the loss)."""
    return _sample_of_chain([(0, turn)])


def samples_of_turns(turns: Sequence[Turn]) -> tuple[Sample, ...]:
    """One sample for every chain of turns that continue each other. A turn joins the longest chain whose tokens
    its prompt begins with, under the same policy and the same distribution settings; otherwise (a fork of what
    already goes on elsewhere, a rewritten history) it starts a sample of its own, in which tokens that earlier
    turns sampled are context."""
    chains: list[list[tuple[int, Turn]]] = []
    for number, turn in enumerate(turns):
        continued = [chain for chain in chains if _continues(turn, chain[-1][1])]
        if continued:
            max(continued, key=lambda chain: len(chain[-1][1].prompt_ids)).append((number, turn))
        else:
            chains.append([(number, turn)])
    return tuple(_sample_of_chain(chain) for chain in chains)


def _continues(turn: Turn, earlier: Turn) -> bool:
    """Whether `turn` saw exactly the tokens of `earlier`, then perhaps more, and was drawn alike."""
    size = len(earlier.prompt_ids) + len(earlier.output_ids)
    return (
        len(turn.prompt_ids) >= size
        and turn.policy == earlier.policy
        and turn.sampling.draws_like(earlier.sampling)
        and np.array_equal(turn.prompt_ids[:size], earlier.token_ids)
    )


def _sample_of_chain(chain: Sequence[tuple[int, Turn]]) -> Sample:
    """Turns that continue each other as one sequence. What lies between their outputs is context."""
    last = chain[-1][1]
    token_ids = last.token_ids
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    versions = np.full(len(token_ids), NOT_SAMPLED, dtype=np.int32)
    mixed = np.zeros(len(token_ids), dtype=np.bool_)
    spans = []
    masks: list[MaskRef] = []
    routes: list[RoutingRef] = []
    for number, turn in chain:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids)
        loss_mask[start:end] = True
        logprobs[start:end] = turn.logprobs
        versions[start:end] = turn.versions
        mixed[start:end] = _behind_others(versions[:end])[start:] if turn.mixed is None else turn.mixed
        spans.append(TurnSpan(turn=number, start=start, end=end))
        masks += [mask.shifted(start) for mask in turn.sampling_masks]
        # What an earlier turn has recorded stays: those experts sampled its tokens.
        routes += routes_within(turn.routing, routes[-1].end if routes else 0, end)
    return Sample(
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        mixed=mixed if any(turn.mixed is not None for _, turn in chain) else None,
        sampling=last.sampling,
        policy=last.policy,
        sampling_masks=tuple(masks),
        routing=tuple(routes),
        turns=tuple(spans),
    )


def _behind_others(versions: IntArray) -> BoolArray:
    """Which tokens come after one that an older version has sampled."""
    sampled = np.where(versions == NOT_SAMPLED, np.iinfo(np.int32).max, versions)
    behind: BoolArray = np.minimum.accumulate(sampled) < versions
    return behind
