"""Tracks a running request: its tokens so far, and which of them can be passed on because their version is known.

vLLM reports the versions of tokens when an answer has ended. Until new weights come there is only one version, so
tokens are passed on as they arrive. Tokens that arrive after an update are kept until the end of the answer reports
their versions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.engines.vllm.dialect import Event, versions_of
from penstock.errors import PenstockError
from penstock.records import Chunk, FinishReason, GenerateRequest, Interrupt, RoutingRef


@dataclass(slots=True, eq=False)
class Flight:
    """Tracks one request, over one or several calls of the server."""

    request: GenerateRequest
    version: int = -1
    """The version of the weights that the present call began with."""
    is_certain: bool = True
    """No new weights have come since the call began."""
    keeps_version: bool = False
    """It runs with an adapter. vLLM never changes the adapter of a running answer, and does not report its
    version."""
    interrupt: Interrupt | None = None
    """Why the engine is ending the present call, if it is."""
    done: list[int] = field(default_factory=list)
    """Output tokens of earlier calls."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens of the present call."""
    logprobs: list[float] = field(default_factory=list)
    num_sent: int = 0
    """Tokens of the present call that were passed on."""
    versions: list[int] = field(default_factory=list)
    """Versions of the present call's tokens, as far as they are certain."""
    restarts: bool = False
    """What was passed on before is void."""
    routed_until: int = field(init=False)
    """Tokens whose experts have been passed on or were known before; prompt tokens count too."""
    routing: RoutingRef | None = None
    """The experts of the present call, to be sent with its last chunk."""

    def __post_init__(self) -> None:
        self.routed_until = self.request.routing_start

    @property
    def num_before(self) -> int:
        """Return how many output tokens existed when the present call began."""
        return self.request.num_resumed + len(self.done)

    @property
    def num_tokens(self) -> int:
        """Return the number of all tokens so far, prompt included."""
        return self.request.num_prompt + self.num_before + len(self.tokens)

    def begin(self, version: int, *, keeps_version: bool = False) -> None:
        """Reset the state for a new call of the server."""
        self.version, self.is_certain, self.interrupt = version, True, None
        self.keeps_version = keeps_version
        self.tokens, self.logprobs, self.versions = [], [], []
        self.num_sent = 0

    def add(self, event: Event) -> None:
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        if event.finish_reason is not None:
            spans = () if self.keeps_version else event.spans
            exact = versions_of(spans, len(self.tokens), fallback=self.version)
            if exact[: len(self.versions)] != self.versions:
                raise PenstockError(
                    f"request {self.request.id!r}: vLLM says that its tokens are of versions {exact}, and "
                    f"{self.versions} were passed on; weights must only change while it is paused"
                )
            self.versions = exact
        elif self.is_certain or self.keeps_version:
            self.versions += [self.version] * len(event.token_ids)

    def ready(self) -> Iterator[Chunk]:
        """Yield full chunks whose versions are certain. The last tokens wait for the finish reason."""
        size = self.request.chunk_tokens
        while len(self.versions) - self.num_sent >= size:
            yield self._chunk(self.num_sent + size, None)

    def rest(self, reason: FinishReason) -> Iterator[Chunk]:
        """Yield everything that is left, the last chunk with the reason. When the engine closes, tokens with an
        unknown version are left out."""
        size, end = self.request.chunk_tokens, len(self.versions)
        while end - self.num_sent > size:
            yield self._chunk(self.num_sent + size, None)
        yield self._chunk(end, reason, is_last=True)

    def carry_over(self, interrupt: Interrupt) -> tuple[list[Chunk], int]:
        """Handle a call that was ended for new weights: keep its tokens for the next call, or start over. Return
        the chunks that can be passed on, and how many tokens were discarded."""
        if interrupt == "abort_resume":
            chunks = list(self.ready())
            if self.num_sent < len(self.tokens) or self.routing is not None:
                chunks.append(self._chunk(len(self.tokens), None, is_last=True))
            self.done += self.tokens
            return chunks, 0
        discarded = len(self.done) + len(self.tokens)
        self.restarts = self.restarts or self.num_sent > 0 or bool(self.done) or self.request.num_resumed > 0
        self.request, self.done = self.request.from_beginning(), []
        self.routed_until, self.routing = self.request.routing_start, None
        return [], discarded

    def _chunk(self, end: int, reason: FinishReason | None, *, is_last: bool = False) -> Chunk:
        """Make a chunk up to token `end`. The last chunk of a call (`is_last`) carries the experts of all its
        tokens."""
        start, self.num_sent = self.num_sent, end
        restarts, self.restarts = self.restarts, False
        routing = None
        if is_last and self.routing is not None:
            routing, self.routing = self.routing, None
            self.routed_until = routing.end
        return Chunk(
            token_ids=np.array(self.tokens[start:end], dtype=np.int32),
            logprobs=np.array(self.logprobs[start:end], dtype=np.float32),
            versions=np.array(self.versions[start:end], dtype=np.int32),
            mixed=np.array(self._mixed(start, end), dtype=np.bool_),
            finish_reason=reason,
            routing=routing,
            restarts=restarts,
        )

    def _mixed(self, start: int, end: int) -> list[bool]:
        """Return for each token whether KV of older weights was read when it was sampled. A call reads no KV
        that is older than itself. Under `inflight`, KV from before an update stays, even that of a
        half-computed prompt; otherwise it is recomputed, or the call is ended."""
        keeps = self.interrupt == "inflight"
        return [keeps and version != self.version for version in self.versions[start:end]]
