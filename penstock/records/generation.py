"""Defines what engines are asked for and what they answer: token ids in, token ids out."""

from collections.abc import Sequence
from math import inf, isfinite
from typing import Literal

import msgspec
import numpy as np

from penstock.records.base import DEFAULT_POLICY, BoolArray, FloatArray, IntArray, Record, check_aligned
from penstock.records.blobs import MaskRef, RoutingRef, routes_within

LEAST_TEMPERATURE = 1e-6
"""The lowest temperature above 0: logits that are divided by less are no finite numbers."""
FinishReason = Literal["stop", "length", "cancelled"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Says how tokens are drawn. The defaults, zero or one, switch a filter off."""

    max_tokens: int = 256
    """The longest output, in tokens."""
    min_tokens: int = 0
    """The shortest output: before that, no stop token is drawn."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens that are less likely than this share of the most likely one; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that already occur become less likely; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were sampled already; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, and are part of it."""
    stop: tuple[str, ...] = ()
    """Texts that end the output."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of tokens, by id."""
    seed: int | None = None
    """A seed makes the draws repeatable."""

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            (
                "temperature",
                self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < inf,
                f"0, or >= {LEAST_TEMPERATURE:g} and finite",
            ),
            ("top_k", self.top_k >= 0, ">= 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "> 0 and finite (1 is off)"),
            ("presence_penalty", isfinite(self.presence_penalty), "finite (0 is off)"),
            ("stop", all(self.stop), "texts that are not empty"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")

    @property
    def truncates(self) -> bool:
        """Return whether top-k, top-p or min-p may cut tokens out of the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def not_replayed(self) -> tuple[str, ...]:
        """Return the settings that a trainer can't replay: its logprobs would be those of another distribution."""
        settings = {
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "logit_bias": bool(self.logit_bias),
            "min_tokens": self.min_tokens > 0 and bool(self.stop_token_ids),
        }
        return tuple(name for name, is_set in settings.items() if is_set)

    def draws_like(self, other: "SamplingParams") -> bool:
        """Return whether both draw a token from the same distribution. The seed and the end of a generation may
        differ."""
        return self == other or self._distribution() == other._distribution()

    def _distribution(self) -> "SamplingParams":
        return msgspec.structs.replace(self, max_tokens=max(1, self.min_tokens), stop=(), seed=None)


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """Forks an earlier request: the new one continues request `id` after the first `keep` of its tokens, prompt
    and output."""

    id: str
    """The earlier request."""
    keep: int
    """How many of its tokens are the same."""


class GenerateRequest(Record, frozen=True, kw_only=True):
    """Asks an engine to continue token ids. A smaller `priority` is served sooner (the runner passes the group's
    admission number)."""

    id: str
    """Unique among requests that are running."""
    token_ids: IntArray
    """The context."""
    sampling: SamplingParams
    """How to draw."""
    policy: str = DEFAULT_POLICY
    """The policy whose weights to use."""
    parent: Parent | None = None
    """An earlier request whose cache can be continued."""
    priority: int = 0
    """A smaller number is served sooner."""
    chunk_tokens: int = 1
    """A chunk is sent after this many tokens, and at the end."""
    record_sampling_mask: bool = False
    """Whether to record which tokens truncation kept."""
    record_routing: bool = False
    """Whether to record the experts of a mixture model, if the engine can."""
    routing_start: int = 0
    """The first token whose experts to record: those of earlier tokens are known."""
    routing: tuple[RoutingRef, ...] = ()
    """The experts of earlier tokens. An engine that must recompute these tokens uses the same experts."""
    routing_before: int = 0
    """The value of `routing_start` before any output was known."""
    record_every: int = 0
    """Recorded data is stored after every so many tokens, so that another engine can continue from there; 0:
    only at the end."""
    blob_scope: str = "requests"
    """The scope of its recorded data in the blob store. The caller deletes the scope."""
    num_resumed: int = 0
    """How many tokens at the end of `token_ids` are output that was sampled before; the answer continues after
    them. Limits, stop texts, penalties and draws count from the beginning of the output. Chunks hold only new
    tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_resumed <= min(len(self.token_ids), self.sampling.max_tokens - 1):
            raise ValueError(
                f"request {self.id!r}: num_resumed must be in 0..{self.sampling.max_tokens - 1} and within its "
                f"{len(self.token_ids)} tokens, got {self.num_resumed}"
            )

    @property
    def num_prompt(self) -> int:
        """Return how many tokens precede the output."""
        return len(self.token_ids) - self.num_resumed

    def from_beginning(self) -> "GenerateRequest":
        """Return the request without any output. Experts that were recorded with the output are asked for again."""
        if not self.num_resumed:
            return self
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[: self.num_prompt],
            num_resumed=0,
            routing_start=self.routing_before,
            routing=routes_within(self.routing, 0, self.routing_before),
        )


class SamplingMask(Record, frozen=True, kw_only=True):
    """Holds the ids that truncation kept, per sampled token; `penstock.records.sampling_masks` packs and reads
    them.

    `words` holds token after token: its ids, ascending, or, where that takes fewer words, a little-endian
    bitmask of the vocabulary, in which bit b of word w stands for id 32 w + b.
    """

    counts: IntArray
    """How many ids each token kept; 0 means that nothing was cut."""
    words: IntArray
    """Ids or bitmasks, token after token."""
    vocab_size: int
    """Size of the model's vocabulary."""

    def __post_init__(self) -> None:
        if len(self.words) != int(self.sizes.sum()):
            raise ValueError(
                f"SamplingMask: its counts are of {self.sizes.sum()} words, got {len(self.words)}; "
                "make it with pack_mask"
            )

    @property
    def sizes(self) -> IntArray:
        """Return the number of words of each token. If a token has fewer words than ids, they are a bitmask."""
        return np.minimum(self.counts, self.bitmask_words(self.vocab_size))

    @staticmethod
    def bitmask_words(vocab_size: int) -> int:
        return -(-vocab_size // 32)


class Chunk(Record, frozen=True, kw_only=True):
    """Carries the next tokens of one generation in aligned arrays. The last chunk has a `finish_reason`."""

    token_ids: IntArray
    """The next sampled tokens."""
    logprobs: FloatArray
    """Logprob of each token, under the distribution that it was drawn from."""
    versions: IntArray
    """The version that sampled each token."""
    mixed: BoolArray | None = None
    """Whether each token was sampled with keys and values of older weights in its context; None if the engine
    does not know."""
    finish_reason: FinishReason | None = None
    """Why the generation ended; None while it continues."""
    sampling_mask: MaskRef | None = None
    """The mask of tokens up to the end of this chunk, which may include earlier chunks."""
    routing: RoutingRef | None = None
    """The experts of the tokens up to the last but one, from `routing_start` or where the routing before ended."""
    restarts: bool = False
    """Whether the generation restarts with this chunk, so that earlier chunks are void."""

    def __post_init__(self) -> None:
        check_aligned("Chunk", self.token_ids, self.logprobs, self.versions)
        if self.mixed is not None:
            check_aligned("Chunk", self.token_ids, self.mixed)


def since_restart(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Return the chunks that count: those since the last restart."""
    begins = [number for number, chunk in enumerate(chunks) if chunk.restarts]
    return chunks[begins[-1] :] if begins else chunks


class EngineReport(Record, frozen=True, kw_only=True):
    """Reports health, served versions and capabilities of an engine, with cumulative counters.

    `counters` holds at least `busy_s`, `tokens`, `requests`, `steps`.
    """

    name: str
    """The engine's name."""
    versions: dict[str, int]
    """The version that it serves, by policy."""
    capabilities: tuple[str, ...]
    """What it can do beyond generating, such as `interrupt:drain`."""
    num_running: int
    """Requests in its batch."""
    num_waiting: int
    """Requests that wait for the batch."""
    max_context: int
    """The longest sequence that it serves."""
    counters: dict[str, float] = {}
    """What has been done since it started."""
