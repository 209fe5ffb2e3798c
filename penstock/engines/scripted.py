"""Provides an engine with scripted answers, for tests and for trying a pipeline without a model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np

from penstock.engines.engine_checks import check_update
from penstock.errors import PenstockError, RequestRefused
from penstock.records import (
    DEFAULT_POLICY,
    Chunk,
    EngineReport,
    FinishReason,
    GenerateRequest,
    Interrupt,
    UpdateReceipt,
    WeightUpdate,
)

INTERRUPTS: tuple[Interrupt, ...] = ("inflight", "inflight_recompute")
"""There is no KV to recompute, so both behave the same."""
CAPABILITIES = (
    "logprobs",
    "versions",
    "delta",
    "exact_resume",
    *(f"interrupt:{each}" for each in INTERRUPTS),
)
Script = Callable[[GenerateRequest], Sequence[int]]


class ScriptedEngine:
    """Answers each request with `script(request)`, one token at a time.

    The answer ends for length at `max_tokens` or `max_context`; otherwise it stops at the script's end or at a stop
    token. Every token is labelled with the version that is served when it is emitted. Before each token the engine
    awaits `sleep(token_s)`; a test passes its own `sleep` to decide when tokens come.
    """

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted0",
        version: int = 0,
        policy: str = DEFAULT_POLICY,
        max_context: int = 4096,
        logprob: float = -1.0,
        token_s: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self.version = version
        self._base = version
        self.policy = policy
        self.updates: list[WeightUpdate] = []
        self.requests: list[GenerateRequest] = []
        self._script = script
        self._max_context = max_context
        self._logprob = logprob
        self._token_s = token_s
        self._sleep = sleep
        self._running: set[str] = set()
        self._closed = asyncio.Event()
        self._num_tokens = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self._closed.is_set():
            raise PenstockError(f"{self.name} is closed")
        self._check(request)
        self.requests.append(request)
        self._running.add(request.id)
        try:
            async for chunk in self._play(request):
                yield chunk
        finally:
            self._running.discard(request.id)

    async def stage(self, update: WeightUpdate) -> None:
        """Do nothing, since there is nothing to fetch."""

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        served = {self.policy: self.version}
        check_update(
            update, interrupt, name=self.name, versions=served, base=self._base, interrupts=INTERRUPTS
        )
        self.updates.append(update)
        self.version = update.version
        if update.selection != "adapter":
            self._base = update.version
        return UpdateReceipt(policy=self.policy, version=self.version, stall_s=0.0, verify_s=0.0)

    async def report(self) -> EngineReport:
        return EngineReport(
            name=self.name,
            versions={self.policy: self.version},
            capabilities=CAPABILITIES,
            num_running=len(self._running),
            num_waiting=0,
            max_context=self._max_context,
            counters={
                "busy_s": 0.0,
                "tokens": float(self._num_tokens),
                "requests": float(len(self.requests)),
                "steps": float(self._num_tokens),
            },
        )

    async def run(self) -> None:
        """Wait for `close`, since nothing has to run between requests."""
        await self._closed.wait()

    async def close(self) -> None:
        self._closed.set()

    def _check(self, request: GenerateRequest) -> None:
        num_prompt = len(request.token_ids)
        rules = (
            (request.id not in self._running, "its id is in use by a request that is still running"),
            (request.policy == self.policy, f"this engine serves policy {self.policy!r}"),
            (0 < num_prompt < self._max_context, f"its prompt must have 1..{self._max_context - 1} tokens"),
        )
        for holds, reason in rules:
            if not holds:
                raise RequestRefused(f"request {request.id!r} was refused: {reason}")

    async def _play(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        sampling = request.sampling
        room = min(sampling.max_tokens, self._max_context - request.num_prompt)
        script = list(self._script(request.from_beginning()))
        if not script:
            raise PenstockError(f"the script of {self.name} must give at least one token, got none")
        tokens: list[int] = []
        versions: list[int] = []
        first = request.num_resumed
        for number, token in enumerate(script[first:room], start=first + 1):
            if await self._interrupted():
                yield self._chunk(tokens, versions, "cancelled")
                return
            tokens.append(token)
            versions.append(self.version)
            self._num_tokens += 1
            stops = token in sampling.stop_token_ids and number >= sampling.min_tokens
            if stops or number == min(len(script), room):
                at_end = stops or number < room
                yield self._chunk(tokens, versions, "stop" if at_end else "length")
                return
            if len(tokens) >= request.chunk_tokens:
                yield self._chunk(tokens, versions, None)
                tokens, versions = [], []

    async def _interrupted(self) -> bool:
        """Wait until the next token is due, and return whether the engine was closed meanwhile."""
        waits = [
            asyncio.ensure_future(self._sleep(self._token_s)),
            asyncio.ensure_future(self._closed.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return self._closed.is_set()

    def _chunk(self, tokens: list[int], versions: list[int], reason: FinishReason | None) -> Chunk:
        return Chunk(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.full(len(tokens), self._logprob, dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
            finish_reason=reason,
        )
