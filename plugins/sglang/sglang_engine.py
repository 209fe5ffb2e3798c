"""An engine whose tokens come from an SGLang server that runs already.

Weights are loaded from the disk while no answer is under way, so an answer has one version, and `drain` is the one
interrupt. They are verified when they arrive here; what the server loads from the file is not looked at.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping

from sglang_dialect import GENERATE, CumulativeStream, body_of
from weight_folders import WeightFolders

from penstock.engines.engine_checks import check_request, check_update
from penstock.engines.vllm.flight import Flight
from penstock.engines.vllm.server_client import SILENCE_S, Call, ServerClient
from penstock.errors import PenstockError
from penstock.records import (
    Chunk,
    EngineReport,
    GenerateRequest,
    Interrupt,
    UpdateReceipt,
    WeightUpdate,
)

INTERRUPTS: tuple[Interrupt, ...] = ("drain",)
CAPABILITIES = (
    "logprobs",
    "versions",
    "greedy",
    "seed",
    "truncation",
    "penalties",
    "min_tokens",
    "stop_strings",
    *(f"interrupt:{each}" for each in INTERRUPTS),
)


class SglangEngine:
    """`client` speaks to a server that is there."""

    progress_limit_s = SILENCE_S

    def __init__(
        self,
        client: ServerClient,
        folders: WeightFolders,
        *,
        name: str,
        versions: Mapping[str, int],
        max_context: int,
        vocab_size: int,
    ) -> None:
        self.name = name
        self.versions = dict(versions)
        self._client = client
        self._folders = folders
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._flights: dict[str, Flight] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._ended = asyncio.Event()
        self._updating = asyncio.Lock()
        self._closed = asyncio.Event()
        self._counters = dict.fromkeys(("tokens", "requests", "steps", "busy_s"), 0.0)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks of the request's output. Closing the iterator cancels the request."""
        self._check_open()
        check_request(
            request,
            policies=self.versions,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            is_known=request.id in self._flights,
        )
        await self._open.wait()
        self._check_open()
        flight = self._flights[request.id] = Flight(request)
        flight.begin(self.versions[request.policy], keeps_version=True)
        self._counters["requests"] += 1
        started = time.perf_counter()
        try:
            async for chunk in self._answer(flight):
                yield chunk
        finally:
            self._counters["busy_s"] += time.perf_counter() - started
            del self._flights[request.id]
            self._ended.set()

    async def stage(self, update: WeightUpdate) -> None:
        """Weights are fetched when they are loaded."""

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        async with self._updating:
            self._check_open()
            check_update(update, interrupt, name=self.name, versions=self.versions, interrupts=INTERRUPTS)
            if update.selection != "full":
                raise PenstockError(f"{self.name} takes whole weights, got selection {update.selection!r}")
            started = time.perf_counter()
            folder = await asyncio.to_thread(self._folders.write, update) if update.tensors else None
            staged = time.perf_counter()
            self._open.clear()
            try:
                while self._flights:
                    self._ended.clear()
                    await self._ended.wait()
                drained = time.perf_counter()
                if folder is not None:
                    body = {
                        "model_path": str(folder),
                        "flush_cache": True,
                        "weight_version": str(update.version),
                    }
                    answer = await self._client.post("/update_weights_from_disk", body)
                    if not answer.get("success", False):
                        raise PenstockError(
                            f"{self.name}: SGLang did not load the weights: {answer.get('message')}"
                        )
                self.versions[update.policy] = update.version
            finally:
                self._open.set()
            self._folders.remove_before(update.version)
            return UpdateReceipt(
                policy=update.policy,
                version=update.version,
                stage_s=staged - started,
                drain_s=drained - staged,
                stall_s=time.perf_counter() - drained,
                verify_s=0.0,
            )

    async def report(self) -> EngineReport:
        return EngineReport(
            name=self.name,
            versions=dict(self.versions),
            capabilities=CAPABILITIES,
            num_running=len(self._flights),
            num_waiting=0,
            max_context=self._max_context,
            counters=dict(self._counters),
        )

    def progress(self) -> int | None:
        """Events of the server so far, which come with its tokens; None while no answer is under way."""
        return int(self._counters["steps"]) if self._flights else None

    async def run(self) -> None:
        """The server works by itself."""
        await self._closed.wait()

    async def close(self) -> None:
        """Every request ends as cancelled. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._open.set()
        await self._client.close()
        self._folders.close()

    async def _answer(self, flight: Flight) -> AsyncIterator[Chunk]:
        request = flight.request
        body = body_of(request, max_context=self._max_context)
        stream = self._client.stream(GENERATE, body, CumulativeStream().parse, request_id=request.id)
        async with Call(stream, self._closed, what=f"{self.name}'s answer to {request.id!r}") as call:
            async for event in call.events():
                flight.add(event)
                self._counters["tokens"] += len(event.token_ids)
                self._counters["steps"] += 1
                reason = event.finish_reason
                if reason is None:
                    chunks = flight.ready()
                else:
                    known = {"stop", "length"}
                    chunks = flight.rest(
                        "cancelled" if reason not in known else "stop" if reason == "stop" else "length"
                    )
                for chunk in chunks:
                    yield chunk
        if call.was_closed:
            for chunk in flight.rest("cancelled"):
                yield chunk

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise PenstockError(f"{self.name} is closed")
