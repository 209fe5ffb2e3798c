"""The records that flow from stage to stage: frozen, aligned, and checked when they are made.

    Task ─► Turn… = Episode ─► Group ─► ScoredGroup ─► StepPlan ─► StepResult, WeightUpdate

Every record is a msgspec struct, so the same object travels inside a process and over a channel
(`penstock.channel.codec` turns arrays into bytes). Nothing here imports torch.
"""

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

DEFAULT_POLICY = "policy"
NOT_SAMPLED = -1
"""`versions[i]` where the policy did not sample token i (prompt, tool output)."""

FinishReason = Literal["stop", "length", "cancelled"]


class Record(msgspec.Struct, frozen=True, eq=False):
    """Base of all records. Equality is identity: arrays have none.

    Each record says `frozen` and `kw_only` again, since type checkers do not see them inherited."""


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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Zero or one switches a filter off, as the defaults do."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logit_bias: dict[int, float] = {}
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k >= 0, ">= 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0 (1 is off)"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may cut tokens out of the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """Fork: the request continues request `id` after the first `keep` of its tokens (prompt and output)."""

    id: str
    keep: int


class GenerateRequest(Record, frozen=True, kw_only=True):
    """Token ids in. `priority`: smaller is sooner (the runner gives the group's admission number)."""

    id: str
    token_ids: IntArray
    sampling: SamplingParams
    policy: str = DEFAULT_POLICY
    parent: Parent | None = None
    priority: int = 0
    chunk_tokens: int = 1
    """A chunk is sent once this many tokens are there, and at the end."""
    record_sampling_mask: bool = False
    record_routing: bool = False


class SamplingMask(Record, frozen=True, kw_only=True):
    """The ids that truncation left, per sampled token; `penstock.sampling_masks` packs and reads them.

    `words` holds token after token: its ids, ascending, or, where that takes fewer words, a little-endian
    bitmask of the vocabulary: bit b of word w stands for id 32 w + b."""

    counts: IntArray
    """Kept ids of each token; 0 means that nothing was cut."""
    words: IntArray
    vocab_size: int

    def __post_init__(self) -> None:
        if len(self.words) != int(self.sizes.sum()):
            raise ValueError(
                f"SamplingMask: its counts are of {self.sizes.sum()} words, got {len(self.words)}; "
                "make it with pack_mask"
            )

    @property
    def sizes(self) -> IntArray:
        """Words of each token. Where they are fewer than its ids, they are a bitmask."""
        return np.minimum(self.counts, self.bitmask_words(self.vocab_size))

    @staticmethod
    def bitmask_words(vocab_size: int) -> int:
        return -(-vocab_size // 32)


class Chunk(Record, frozen=True, kw_only=True):
    """Token ids out: aligned pieces of one generation. The last one carries `finish_reason`."""

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason | None = None
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        check_aligned("Chunk", self.token_ids, self.logprobs, self.versions)
        if self.sampling_mask is not None:
            check_aligned("Chunk with its sampling mask", self.token_ids, self.sampling_mask.counts)


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


class StepScore(Record, frozen=True, kw_only=True):
    """The value of a part of an episode: tokens start..end of a turn's output."""

    turn: int
    start: int
    end: int
    value: float


class Score(Record, frozen=True, kw_only=True):
    """What an episode is worth: one value, the named parts that it is made of, values of steps."""

    value: float
    parts: dict[str, float] = {}
    steps: tuple[StepScore, ...] = ()


class ScoredGroup(Record, frozen=True, kw_only=True):
    """A group with one score per episode."""

    group: Group
    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        check_aligned("ScoredGroup", self.group.episodes, self.scores)

    @property
    def values(self) -> FloatArray:
        return np.array([score.value for score in self.scores], dtype=np.float32)


class TrainSequence(Record, frozen=True, kw_only=True):
    """A sample and where it comes from: `group` and `episode` index into the plan's `scores`."""

    sample: Sample
    group: int
    episode: int
    turns: tuple[tuple[int, int], ...] = ()
    """(turn, start): where in the sample the output of each of its turns begins."""


class StepPlan(Record, frozen=True, kw_only=True):
    """One optimizer step for one rank, as data: its micro-batches, and the step-wide facts (scores of
    every group, denominators) that every rank needs to normalise alike."""

    step: int
    """The optimizer step that this plan makes: 1, 2, …"""
    version: int
    """The version of the weights it is computed on; staleness is counted from it."""
    scores: tuple[tuple[Score, ...], ...]
    micro_batches: tuple[tuple[TrainSequence, ...], ...]
    num_loss_tokens: int
    num_sequences: int
    """Sequences with at least one loss token, over all ranks."""
    num_tokens: tuple[tuple[int, ...], ...] = ()
    """Sampled tokens of every episode, aligned with `scores`."""


class StepResult(Record, frozen=True, kw_only=True):
    """What one rank reports of a step: metrics by name, and where its time went."""

    step: int
    metrics: dict[str, float]
    seconds: dict[str, float]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's place in a publication: its global shape, its dtype and its bytes in one bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    num_bytes: int


class WeightUpdate(Record, frozen=True, kw_only=True):
    """A published version, ready to be taken: what to read, where, and what it must add up to."""

    policy: str = DEFAULT_POLICY
    version: int
    transport: str
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[str, ...]
    """Names by which the transport finds each bucket (a shared-memory name, a file, …)."""
    fingerprint: dict[str, int]
    """One hash per tensor name, of the values as an engine must hold them."""
    recompute_kv: bool = False


class UpdateReceipt(Record, frozen=True, kw_only=True):
    """What an engine says after an update: verified, and what it cost."""

    policy: str
    version: int
    stall_s: float
    """How long no forward pass could run because of this update; on a GPU, by the device's own clock."""
    verify_s: float
    """How long the fingerprint took after the copies. On a GPU the next passes may have begun by then."""


class EngineReport(Record, frozen=True, kw_only=True):
    """Health, served versions and capabilities of an engine, with cumulative counters.

    `counters` holds at least `busy_s`, `tokens`, `requests`, `steps`."""

    name: str
    versions: dict[str, int]
    capabilities: tuple[str, ...]
    num_running: int
    num_waiting: int
    max_context: int
    counters: dict[str, float] = {}


def check_aligned(what: str, *columns: Any) -> None:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(f"{what}: its columns must have one length, got {lengths}")


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
