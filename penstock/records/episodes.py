"""Defines tasks and what attempts at them are made of: turns, episodes, groups, and samples to train on."""

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
    """Holds one chat message."""

    role: str
    """The speaker: `system`, `user`, `assistant`, or another role that the chat template knows."""
    content: str
    """The text of the message."""


class Task(Record, frozen=True, kw_only=True):
    """Holds one dataset item: a prompt, and the columns that its environment or reward needs."""

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
        """Return whether the prompt is chat messages."""
        return not isinstance(self.prompt, str)


class Turn(Record, frozen=True, kw_only=True):
    """Holds one generation by one agent: its context, and the tokens that were sampled."""

    id: str = ""
    """The engine request that made it: group, episode and turn, as in `g12.3.0`."""
    parent: str | None = None
    """The id of the turn that it continues or forks from."""
    prompt_ids: IntArray
    """The tokens of the context."""
    output_ids: IntArray
    """The tokens sampled after the context."""
    logprobs: FloatArray
    """Logprob of each sampled token, under the distribution that it was drawn from."""
    versions: IntArray
    """The version of the policy that sampled each token."""
    mixed: BoolArray | None = None
    """Whether each token was sampled with keys and values of older weights in its context; None if the engine
    does not know."""
    finish_reason: FinishReason
    """`stop` (a stop token or string), `length` (at the token limit) or `cancelled`."""
    sampling: SamplingParams
    """How its tokens were drawn."""
    text: str
    """The sampled tokens, decoded."""
    policy: str = DEFAULT_POLICY
    """The policy that sampled the tokens."""
    agent: str = "agent"
    """The agent that made the turn, where a workflow has several."""
    sampling_masks: tuple[MaskRef, ...] = ()
    """Masks of the output tokens, in order. A token that none covers was drawn from the whole vocabulary."""
    routing: tuple[RoutingRef, ...] = ()
    """The experts of its tokens, context and output, in order. Context that an earlier turn recorded has that
    turn's experts. The last token has none, since nothing was computed from it."""

    def __post_init__(self) -> None:
        check_aligned("Turn", self.output_ids, self.logprobs, self.versions)
        if self.mixed is not None:
            check_aligned("Turn", self.output_ids, self.mixed)
        check_masks("Turn", self.sampling_masks, len(self.output_ids))
        check_routes("Turn", self.routing, len(self.prompt_ids) + len(self.output_ids))

    @property
    def token_ids(self) -> IntArray:
        """Return the context and the output as one sequence."""
        return np.concatenate([self.prompt_ids, self.output_ids]).astype(np.int32, copy=False)


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Says where in a sample the output of a turn lies. `turn` counts the turns of its episode from 0."""

    turn: int
    """Which turn."""
    start: int
    """The first token of its output in the sample."""
    end: int
    """One past its last token."""


class Sample(Record, frozen=True, kw_only=True):
    """Holds one flat token sequence, ready to train on. Arrays are aligned. `logprobs` are those of the
    distribution actually sampled from, and 0 where the policy did not sample."""

    token_ids: IntArray
    """Context and sampled tokens, in order."""
    loss_mask: BoolArray
    """Which tokens are trained on."""
    logprobs: FloatArray
    """Logprobs recorded when the tokens were sampled."""
    versions: IntArray
    """The version that sampled each token; -1 where none did."""
    mixed: BoolArray | None = None
    """Whether each token was sampled with keys and values of older weights in its context, which the trainer
    does not compute. None: assume so for every token after one of an older version."""
    sampling: SamplingParams
    """How its tokens were drawn."""
    policy: str = DEFAULT_POLICY
    """The policy that is trained on it."""
    sampling_masks: tuple[MaskRef, ...] = ()
    """The masks of all its turns, in order; `start` counts the sample's tokens."""
    routing: tuple[RoutingRef, ...] = ()
    """The experts of its tokens, in order, each recorded when the token was first computed."""
    turns: tuple[TurnSpan, ...] = ()
    """Where the outputs of its turns are, in order."""
    columns: dict[str, FloatArray] = {}
    """Named values per token for the loss (a teacher's logprobs, a process reward), aligned with `token_ids`; 0
    where a token has none, as in context."""

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
        """Return how many tokens are trained on."""
        return int(self.loss_mask.sum())

    def in_loss_where(self, keep: BoolArray) -> "Sample":
        """Return the sample with only those loss tokens that `keep` marks."""
        return msgspec.structs.replace(self, loss_mask=self.loss_mask & keep)


class StepScore(Record, frozen=True, kw_only=True):
    """Holds the value of a part of an episode: tokens start..end of a turn's output."""

    turn: int
    """Which turn of the episode, from 0."""
    start: int
    """The first token of the step in the output of the turn."""
    end: int
    """One past its last token."""
    value: float
    """The value of the step."""


class TokenColumn(Record, frozen=True, kw_only=True):
    """Holds a named value for each token of a turn's output, for a loss that reads it (`LossTokens.columns`)."""

    turn: int
    """Which turn of the episode, from 0."""
    name: str
    """The name by which a loss finds it."""
    values: FloatArray
    """One value per token of the turn's output."""


class Episode(Record, frozen=True, kw_only=True):
    """Holds one attempt at a task: the turns it made, oldest first. A failed attempt is data too."""

    task_id: str
    """The task that was attempted."""
    turns: tuple[Turn, ...]
    """Oldest first."""
    index: int = 0
    """Its number among the attempts of its group."""
    failure: str | None = None
    """Why it failed: "workflow_error", "workflow_unavailable", "timeout", "refused" or "worker_died"; None if
    it did not."""
    message: str = ""
    """The error message of a failure."""
    reward: float | None = None
    """The reward that its workflow or agent has set; None without one. The reward functions `auto` and
    `episode` use it."""
    parts: dict[str, float] = {}
    """The parts of that reward, by name."""
    steps: tuple[StepScore, ...] = ()
    """The values of steps that its workflow has set."""
    columns: tuple[TokenColumn, ...] = ()
    """The values of single tokens that its workflow has set."""
    rewrites: dict[str, int] = {}
    """How many turns could not continue the tokens of the turn before, since earlier messages were rewritten:
    by `client` or by `template`."""
    unread_answers: int = 0
    """How many answers no client has read to their end. Their turns are no part of the episode."""

    @property
    def text(self) -> str:
        """Return the last turn's text, which plain rewards get."""
        return self.turns[-1].text if self.turns else ""

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens all turns have sampled."""
        return sum(len(turn.output_ids) for turn in self.turns)

    def samples(self) -> tuple[Sample, ...]:
        """Return its turns as samples, with turns that continue each other as one. Every sampled token is in the
        loss of exactly one sample. A failed episode has no samples."""
        return () if self.failure is not None else samples_of_turns(self.turns)


class Group(Record, frozen=True, kw_only=True):
    """Holds the episodes of one task that are compared with each other: admitted, scored, buffered, dropped and
    trained as one. Failed episodes are kept apart, so that nothing that is computed over `episodes` counts
    them."""

    number: int
    """Its number in the order of admission, from 0."""
    task: Task
    """The task that was attempted."""
    episodes: tuple[Episode, ...]
    """The successful episodes."""
    failures: tuple[Episode, ...] = ()
    """The failed episodes."""

    @classmethod
    def of(cls, number: int, task: Task, episodes: Iterable[Episode]) -> "Group":
        """Make a group of episodes as they ended, with the failed ones apart."""
        every = tuple(episodes)
        return cls(
            number=number,
            task=task,
            episodes=tuple(episode for episode in every if episode.failure is None),
            failures=tuple(episode for episode in every if episode.failure is not None),
        )


def sample_of_turn(turn: Turn) -> Sample:
    """Lay out one turn as a flat sample: its prompt (not in the loss), then its output (in the loss)."""
    return _sample_of_chain([(0, turn)])


def samples_of_turns(turns: Sequence[Turn]) -> tuple[Sample, ...]:
    """Make one sample of every chain of turns that continue each other. A turn joins the longest chain whose
    tokens its prompt begins with, under the same policy and the same distribution settings. Otherwise (a fork
    of a chain that continued differently, a rewritten history) it starts its own sample, in which tokens that
    earlier turns sampled are context."""
    chains: list[list[tuple[int, Turn]]] = []
    for number, turn in enumerate(turns):
        continued = [chain for chain in chains if _continues(turn, chain[-1][1])]
        if continued:
            max(continued, key=lambda chain: len(chain[-1][1].prompt_ids)).append((number, turn))
        else:
            chains.append([(number, turn)])
    return tuple(_sample_of_chain(chain) for chain in chains)


def _continues(turn: Turn, earlier: Turn) -> bool:
    """Return whether `turn` saw exactly the tokens of `earlier`, then perhaps more, and was sampled with the
    same distribution settings."""
    size = len(earlier.prompt_ids) + len(earlier.output_ids)
    return (
        len(turn.prompt_ids) >= size
        and turn.policy == earlier.policy
        and turn.sampling.draws_like(earlier.sampling)
        and np.array_equal(turn.prompt_ids[:size], earlier.token_ids)
    )


def _sample_of_chain(chain: Sequence[tuple[int, Turn]]) -> Sample:
    """Join turns that continue each other into one sequence. Tokens between their outputs are context."""
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
        # Keep what an earlier turn has recorded: its tokens were sampled with those experts.
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
    """Mark the tokens that come after one that an older version has sampled."""
    sampled = np.where(versions == NOT_SAMPLED, np.iinfo(np.int32).max, versions)
    behind: BoolArray = np.minimum.accumulate(sampled) < versions
    return behind
