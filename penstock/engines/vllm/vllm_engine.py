"""Implements an engine whose tokens come from a vLLM server.

    generate ─► POST /inference/v1/generate, streamed          one call, or more where new weights end one
    update   ─► staged by its workers ─► pause ─► load, verified by its workers ─► resume

A server of our own that dies is restarted. Until it has the trainer's weights, requests raise `EngineLost`,
and a pool gives them to other engines.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from penstock.engines.engine_checks import check_request, check_update
from penstock.engines.vllm.adapter_files import AdapterFiles
from penstock.engines.vllm.dialect import Ask, Event, parse_event
from penstock.engines.vllm.flight import Flight
from penstock.engines.vllm.routed_experts import RouterLayout, store_answer
from penstock.engines.vllm.server import Server
from penstock.engines.vllm.server_client import GENERATE, SILENCE_S, Call
from penstock.engines.vllm.vllm_kind import CAPABILITIES, interrupts
from penstock.engines.vllm.weight_calls import ABORTING, HalfLoaded, Loaded, paused
from penstock.errors import EngineLost, PenstockError
from penstock.records import (
    Chunk,
    EngineReport,
    GenerateRequest,
    Interrupt,
    UpdateReceipt,
    WeightUpdate,
)
from penstock.records.interfaces import BlobStore

NO_VERSION = -1


class VllmEngine:
    """Generates on a `server` that is already running. With `adapters`, an adapter is trained: a request then
    keeps its version until it ends, and `drain` is the only interrupt. With `layout`, experts are recorded
    and stored in `blobs`."""

    progress_limit_s = SILENCE_S

    def __init__(
        self,
        server: Server,
        *,
        name: str,
        versions: Mapping[str, int],
        max_context: int,
        vocab_size: int,
        adapters: AdapterFiles | None = None,
        blobs: BlobStore | None = None,
        layout: RouterLayout | None = None,
    ) -> None:
        self.name = name
        self.versions = dict(versions)
        self._base = next(iter(versions.values()))
        """The version of the last full weights."""
        self._server = server
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._blobs = blobs
        self._layout = layout
        self._flights: dict[str, Flight] = {}
        self._open = asyncio.Event()
        """Set while new calls may begin, that is while no update is being loaded."""
        self._open.set()
        self._is_paused = False
        self._updating = asyncio.Lock()
        self._staged: WeightUpdate | None = None
        self._closed = asyncio.Event()
        self._lost: EngineLost | None = None
        self._losing = asyncio.Event()
        """Set when the server is lost, and then replaced by a new event."""
        self._counters = dict.fromkeys(("tokens", "requests", "steps", "discarded_tokens", "drain_s"), 0.0)
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def interrupts(self) -> tuple[Interrupt, ...]:
        return interrupts(with_adapter=self._adapters is not None, with_routing=self._layout is not None)

    @property
    def server_pid(self) -> int | None:
        """Return the process id of the server that this engine started; None if it joined one or none runs."""
        return self._server.pid

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Yield chunks of the request's output. Closing the iterator cancels the request."""
        self._check_there()
        check_request(
            request,
            policies=self.versions,
            vocab_size=self._vocab_size,
            max_context=self._max_context,
            is_known=request.id in self._flights,
        )
        flight = self._begin(request)
        try:
            while True:
                async with aclosing(self._call(flight)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
        finally:
            self._end(flight)

    async def stage(self, update: WeightUpdate) -> None:
        """Let the server's workers fetch the weights while they generate."""
        async with self._updating:
            self._check_update(update, self.interrupts[0])
            await self._stage(update)

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Stage unless that is done, then pause, load and resume. A load that fails halfway costs the server; after
        any other failure it serves its previous weights."""
        async with self._updating:
            self._check_update(update, interrupt)
            started = time.perf_counter()
            if self._staged is None or _identity(self._staged) != _identity(update):
                await self._stage(update)
            self._staged = None
            stage_s = time.perf_counter() - started
            if update.selection == "adapter":
                return await self._take_adapter(update, stage_s)
            return await self._take(update, interrupt, stage_s)

    async def report(self) -> EngineReport:
        parts = {"adapters": self._adapters, "routing": self._layout}
        more = [name for name, part in parts.items() if part is not None]
        busy_s = self._busy_s + (time.perf_counter() - self._busy_since if self._flights else 0.0)
        return EngineReport(
            name=self.name,
            versions=dict(self.versions),
            capabilities=(*CAPABILITIES, *more, *(f"interrupt:{each}" for each in self.interrupts)),
            num_running=len(self._flights),
            num_waiting=0,
            max_context=self._max_context,
            counters={**self._counters, "busy_s": busy_s},
        )

    def progress(self) -> int | None:
        """Return how many events the server has sent, which come with its tokens. Return None while it has
        nothing to compute. This finds a server whose HTTP side answers while its core is stuck."""
        is_due = self._flights and not self._is_paused and self._lost is None
        return int(self._counters["steps"]) if is_due else None

    async def run(self) -> None:
        """Watch the server until `close`, and restart it each time it dies, as often as the config allows."""
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            while True:
                dying = asyncio.ensure_future(self._server.died())
                try:
                    await asyncio.wait({dying, closing}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    dying.cancel()
                if self._closed.is_set():
                    return
                self._lose(dying.result())
                async with self._updating:  # no update may meet a server that is not running
                    await self._server.restart(NO_VERSION)
        finally:
            closing.cancel()

    async def close(self) -> None:
        """End every request as cancelled, with the tokens that it has, and end a server of our own. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._adapters is not None:
            await self._adapters.close(self._server.client)
        await self._server.close()

    def _begin(self, request: GenerateRequest) -> Flight:
        if not self._flights:
            self._busy_since = time.perf_counter()
        self._counters["requests"] += 1
        flight = self._flights[request.id] = Flight(request)
        return flight

    def _end(self, flight: Flight) -> None:
        del self._flights[flight.request.id]
        if not self._flights:
            self._busy_s += time.perf_counter() - self._busy_since

    async def _call(self, flight: Flight) -> AsyncGenerator[Chunk, None]:
        """Run one call of the server. Its last chunk has no reason if another call continues the request."""
        await self._open.wait()
        self._check_there()
        request = flight.request
        version = self.versions[request.policy]
        adapter = "" if self._adapters is None else self._adapters.begin(request.id)
        flight.begin(version, keeps_version=bool(adapter))
        ask = Ask(
            request=request,
            generated=flight.done,
            max_context=self._max_context,
            salt=f"{request.policy}:{version}",
            adapter=adapter,
            routing_start=flight.routed_until if self._layout is not None else 0,
        )
        try:
            stream = self._server.client.stream(GENERATE, ask.body(), parse_event, request_id=request.id)
            what = f"{self.name}'s answer to {request.id!r}"
            async with Call(stream, self._closed, self._losing, what=what) as call:
                async for event in call.events():
                    flight.add(event)
                    self._counters["tokens"] += len(event.token_ids)
                    self._counters["steps"] += 1
                    for chunk in await self._chunks(flight, event):
                        yield chunk
            if call.was_closed:
                for chunk in flight.rest("cancelled"):
                    yield chunk
        finally:
            if self._adapters is not None:
                self._adapters.end(request.id)

    async def _chunks(self, flight: Flight, event: Event) -> list[Chunk]:
        reason, interrupt = event.finish_reason, flight.interrupt
        if reason is None:
            return list(flight.ready())
        is_cut_off = reason == "abort" and interrupt in ABORTING
        if self._layout is not None and not (is_cut_off and interrupt == "abort_retry"):
            assert self._blobs is not None
            flight.routing = await asyncio.to_thread(  # megabytes for a long answer
                store_answer, self._blobs, flight, event.routes, self._layout
            )
        if is_cut_off:
            assert interrupt is not None
            chunks, discarded = flight.carry_over(interrupt)
            self._counters["discarded_tokens"] += discarded
            return chunks
        if reason in ("stop", "length"):
            return list(flight.rest("stop" if reason == "stop" else "length"))
        return list(flight.rest("cancelled"))

    async def _stage(self, update: WeightUpdate) -> None:
        if update.selection == "adapter":
            assert self._adapters is not None
            await self._adapters.write(update)
        else:
            await self._server.weights.stage(update)
        self._staged = update

    async def _take(self, update: WeightUpdate, interrupt: Interrupt, stage_s: float) -> UpdateReceipt:
        self._open.clear()
        for flight in self._flights.values():
            flight.interrupt = interrupt
        discarded = self._counters["discarded_tokens"]
        try:
            async with paused(self._server.client, interrupt) as stall:
                loaded = await self._load(update)
                self.versions[update.policy] = self._base = update.version
                self._lost = None
                for flight in self._flights.values():  # what arrives from here on may be of either version
                    flight.is_certain = False
        except HalfLoaded as error:
            self._lose(EngineLost(f"{error}; its server is no longer of use"))
            await self._server.kill()
            raise
        finally:
            self._open.set()
        if self._adapters is not None:
            self._adapters.forget()
        drain_s = stall.pause_s if interrupt == "drain" else 0.0
        self._counters["drain_s"] += drain_s
        return UpdateReceipt(
            policy=update.policy,
            version=update.version,
            stage_s=stage_s,
            stall_s=stall.stall_s,
            verify_s=loaded.verify_s,
            drain_s=drain_s,
            discarded_tokens=int(self._counters["discarded_tokens"] - discarded),
        )

    async def _load(self, update: WeightUpdate) -> Loaded:
        """Load while no progress is expected, because the server is paused."""
        self._is_paused = True
        try:
            return await self._server.weights.load(update)
        finally:
            self._is_paused = False

    async def _take_adapter(self, update: WeightUpdate, stage_s: float) -> UpdateReceipt:
        """Switch new requests to the adapter's version. Running requests keep the version that they began with."""
        assert self._adapters is not None
        await self._adapters.load(self._server.client, update)
        self._lost = None
        self.versions[update.policy] = update.version
        return UpdateReceipt(
            policy=update.policy, version=update.version, stage_s=stage_s, stall_s=0.0, verify_s=0.0
        )

    def _check_there(self) -> None:
        if self._closed.is_set():
            raise PenstockError(f"{self.name} is closed")
        if self._lost is not None:
            raise self._lost

    def _check_update(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        if self._closed.is_set():
            raise PenstockError(f"{self.name} is closed")
        check_update(
            update,
            interrupt,
            name=self.name,
            versions=self.versions,
            interrupts=self.interrupts,
            base=self._base,
            is_intact=self._lost is None or self._adapters is not None,
        )
        if update.selection == "delta" or (update.selection == "adapter" and self._adapters is None):
            raise PenstockError(
                f"{self.name} takes whole weights, got an update of selection {update.selection!r}; set "
                "sync.selection=full"
            )

    def _lose(self, error: EngineLost) -> None:
        """Reset the versions after the server is lost. Its successor has the weights of the model's folder;
        below an adapter these are the right ones, since they never change."""
        self._lost = error
        self._losing.set()
        self._losing = asyncio.Event()
        if self._adapters is None:
            self._base = NO_VERSION
        self.versions = dict.fromkeys(self.versions, NO_VERSION)
        self._staged = None
        if self._adapters is not None:
            self._adapters.forget()


def _identity(update: WeightUpdate) -> tuple[object, ...]:
    return (update.policy, update.version, update.transport, update.selection, update.buckets)
