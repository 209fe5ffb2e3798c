"""Tasks, and what attempts at them are made of: turns, episodes, groups, and samples to train on."""

from typing import Any

import msgspec
import numpy as np

from penstock.types.base import (
    DEFAULT_POLICY,
    NOT_SAMPLED,
    BoolArray,
    FloatArray,
    IntArray,
    Record,
    check_aligned,
)
from penstock.types.generation import FinishReason, SamplingMask, SamplingParams


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message."""

    role: str
    content: str


class Task(Record, frozen=True, kw_only=True):
    """One dataset item: a prompt, and the columns its environment or reward needs."""

    id: str
    prompt: str | tuple[Message, ...]
    columns: dict[str, Any] = {}

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)


class Turn(Record, frozen=True, kw_only=True):
    """One generation by one agent: the context it saw and what it sampled."""

    prompt_ids: IntArray
    output_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    sampling: SamplingParams
    text: str
    policy: str = DEFAULT_POLICY
    agent: str = "agent"
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        check_aligned("Turn", self.output_ids, self.logprobs, self.versions)


class Sample(Record, frozen=True, kw_only=True):
    """One flat token sequence, ready to train on. Arrays are aligned; `logprobs` are those of the
    distribution actually sampled from, and 0 where the policy did not sample."""

    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    sampling: SamplingParams
    policy: str = DEFAULT_POLICY
    sampling_mask: SamplingMask | None = None
    """Rows are aligned with the sampled tokens (`versions != NOT_SAMPLED`), in order."""

    def __post_init__(self) -> None:
        check_aligned("Sample", self.token_ids, self.loss_mask, self.logprobs, self.versions)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def oldest_version(self) -> int | None:
        """The smallest version among tokens in the loss; None when no token is."""
        versions = self.versions[self.loss_mask]
        return int(versions.min()) if versions.size else None

    def masked_below(self, version: int) -> "Sample":
        """The same sample with tokens older than `version` out of the loss."""
        return msgspec.structs.replace(self, loss_mask=self.loss_mask & (self.versions >= version))


class Episode(Record, frozen=True, kw_only=True):
    """One attempt at a task: the turns it made, oldest first."""

    task_id: str
    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """What the reward sees: the last turn's text."""
        return self.turns[-1].text if self.turns else ""

    @property
    def num_output_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    def samples(self) -> tuple[Sample, ...]:
        """One sample per turn. Every sampled token is in the loss of exactly one of them."""
        return tuple(sample_of_turn(turn) for turn in self.turns)


class Group(Record, frozen=True, kw_only=True):
    """The G episodes of one task that are compared with each other: admitted, scored, buffered,
    dropped and trained as one. `number` is its place in the order of admission."""

    number: int
    task: Task
    episodes: tuple[Episode, ...]


def sample_of_turn(turn: Turn) -> Sample:
    """A turn laid out flat: its prompt (not in the loss), then what was sampled (in the loss)."""
    num_prompt = len(turn.prompt_ids)
    sampled = np.ones(len(turn.output_ids), dtype=np.bool_)
    return Sample(
        token_ids=np.concatenate([turn.prompt_ids, turn.output_ids]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(num_prompt, dtype=np.bool_), sampled]),
        logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), turn.logprobs]),
        versions=np.concatenate([np.full(num_prompt, NOT_SAMPLED, dtype=np.int32), turn.versions]),
        sampling=turn.sampling,
        policy=turn.policy,
        sampling_mask=turn.sampling_mask,
    )
