"""The embedded engine runs a Hugging Face model over our paged cache, as an asyncio shell around one step loop.

    generate ─► scheduler ─► stepper: forward, draw ─► outbox ─► chunks
                    ▲                                     │
                    └─────────────────────────────────────┘

Everything happens on one thread. `run` executes one step at a time and yields to the event loop in between,
so anything that another task does, such as a weight update, falls between two forward passes. On a GPU a step
is launched ahead and read later (`cuda.device_stepper`), and an update takes effect between two passes that
are already queued (`cuda.weight_swap`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from penstock.blob_stores import MemoryBlobs
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.adapters.policy_adapters import PolicyAdapters
from penstock.engines.embedded.blocks import BlockPool
from penstock.engines.embedded.embedded_kind import CAPABILITIES
from penstock.engines.embedded.interrupts import Interrupts
from penstock.engines.embedded.model_runner import ModelRunner
from penstock.engines.embedded.outbox import Outbox, Stream
from penstock.engines.embedded.prefix_cache import PrefixCache
from penstock.engines.embedded.scheduler import Scheduler
from penstock.engines.embedded.sequence import Sequence, sequence_of
from penstock.engines.embedded.stepper import HostStepper, Stepper
from penstock.engines.embedded.weight_updates import Health, WeightUpdates
from penstock.engines.engine_checks import check_request, embedded_rules
from penstock.errors import PenstockError
from penstock.models.published import published_tensors
from penstock.records import (
    DEFAULT_POLICY,
    Chunk,
    EngineReport,
    GenerateRequest,
    Interrupt,
    RoutingShape,
    UpdateReceipt,
    WeightUpdate,
)
from penstock.records.interfaces import BlobStore, Tokenizer, WeightReceiver

if TYPE_CHECKING:
    from penstock.engines.embedded.cuda.device import Device

SERVES_DEFAULT: Mapping[str, int] = MappingProxyType({DEFAULT_POLICY: 0})
"""The policies and versions that an engine serves by default."""
LONG_STEP_S, LONG_STEP_TURNS = 0.005, 6
LOOK_AGAIN_S = 0.0005
"""Time between two looks at a busy device."""


class EmbeddedEngine:
    """Serves requests while its owner runs `run()` in a task group; until then they wait.

    `versions` names the policies that the model's weights serve, each with its version. When an adapter
    arrives later, its policy is served with it from then on, whether the policy is one of these or a new one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: EngineConfig,
        receiver: WeightReceiver,
        tokenizer: Tokenizer | None = None,
        name: str = "engine0",
        versions: Mapping[str, int] = SERVES_DEFAULT,
        blobs: BlobStore | None = None,
    ) -> None:
        self.name = name
        self.config = config.embedded
        self.versions = dict(versions)
        self._runner = ModelRunner(
            model, self.config, max_context=config.max_context, record_routing=config.record_routing
        )
        device = self._runner.open_device(self.config, self.versions)
        routes = self._runner.routes
        self._receiver = receiver
        self._tokenizer = tokenizer
        pool = BlockPool(self._runner.num_blocks, self.config.block_size)
        cache = PrefixCache(
            pool,
            enabled=self.config.prefix_cache,
            keep_finished=self.config.keep_finished,
            versions=versions,
            routes=routes,
        )
        self._scheduler = Scheduler(
            cache,
            max_batch=self.config.max_batch,
            prefill_chunk=self.config.prefill_chunk or self._runner.prefill_chunk,
            on_preempt=routes.keep if routes is not None else None,
        )
        self.blobs: BlobStore = MemoryBlobs() if blobs is None else blobs
        if routes is not None:
            routes.blobs = self.blobs
        self._outbox = Outbox(self._scheduler, tokenizer, self._runner.vocab_size, self.blobs, routes)
        self._stepper = self._open_stepper(device)
        self._health = Health(name)
        self._adapters = PolicyAdapters(model, self._stepper.slots, self.config)
        self._wake = asyncio.Event()
        self._is_frozen = False
        self._stands = asyncio.Event()
        """Set while the step loop computes nothing."""
        self._interrupts = Interrupts(
            self._scheduler, self._stepper, resume_kv=self.config.resume_kv, wake=self._wake.set
        )
        self._updates = WeightUpdates(
            self._health,
            self.versions,
            published_tensors(model),
            receiver,
            self._adapters,
            scheduler=self._scheduler,
            stepper=self._stepper,
            outbox=self._outbox,
            interrupts=self._interrupts,
        )
        self._seeds = np.random.default_rng(self.config.seed)
        self._arrivals = 0
        self._busy_s = 0.0
        self._num_steps = 0
        self._num_requests = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Yield chunks of the request's output. Closing the iterator cancels the request."""
        self._health.check()
        limits = {"vocab_size": self._runner.vocab_size, "max_context": self._runner.max_context}
        check_request(
            request,
            policies=self.versions,
            **limits,
            is_known=request.id in self._outbox.streams,
            records_masks=True,
            further=embedded_rules(
                request,
                **limits,
                cache_tokens=self._runner.num_blocks * self.config.block_size,
                has_tokenizer=self._tokenizer is not None,
            ),
        )
        seq = self._sequence(request)
        stream = self._outbox.streams[request.id] = Stream()
        self._stepper.joins(seq)
        self._num_requests += 1
        self._scheduler.add(seq)
        self._wake.set()
        try:
            while True:
                chunk = await stream.next()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._outbox.streams.pop(request.id, None)
            self._stepper.leaves(seq)
            if self._scheduler.find(request.id) is seq:
                self._scheduler.cancel(seq)

    async def stage(self, update: WeightUpdate) -> None:
        await self._updates.stage(update)

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        """Take new weights: stage them while generating, then load them between two forward passes.

        `interrupts.py` says what happens to sequences in flight. Nothing has changed when staging fails, or when an
        adapter fails its verification. When loading full weights fails, the weights may be half old and half new:
        requests raise `EngineLost` until a later full update succeeds, and a pool sends them to another engine or
        lets them wait.
        """
        return await self._updates.take(update, interrupt)

    async def report(self) -> EngineReport:
        scheduler = self._scheduler
        return EngineReport(
            name=self.name,
            versions=dict(self.versions),
            capabilities=CAPABILITIES
            + (("stop_strings",) if self._tokenizer is not None else ())
            + (("routing",) if self._runner.routes is not None else ()),
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            max_context=self._runner.max_context,
            counters={
                **self._stepper.counters,
                **self._interrupts.counters,
                "busy_s": self._busy_s,
                "tokens": float(self._outbox.num_tokens),
                "requests": float(self._num_requests),
                "nonfinite_logits": float(self._outbox.num_nonfinite),
                "free_blocks": float(scheduler.cache.pool.num_free),
                "num_blocks": float(self._runner.num_blocks),
            },
        )

    async def close(self) -> None:
        """Stop serving: every request ends as cancelled and keeps its tokens. Idempotent."""
        if self._health.is_closed:
            return
        self._health.is_closed = True
        self._wake.set()
        self.cancel_all()
        self._receiver.cancel()
        self._updates.close()
        self._receiver.close()

    async def freeze(self) -> None:
        """Stop computing until `thaw`, and return once the step loop is idle. Requests stay where they are."""
        self._is_frozen = True
        self._wake.set()
        await self._stands.wait()

    async def finish_running(self) -> None:
        """Wait until everything that can be computed is computed, whether or not its chunks are read. Return early
        if the engine is frozen, fails or closes."""
        while self._scheduler.has_work and self.is_healthy and not self._is_frozen:
            self._stands.clear()
            self._wake.set()
            await self._stands.wait()

    def thaw(self) -> None:
        self._is_frozen = False
        self._wake.set()

    def cancel_all(self) -> None:
        """End every request as cancelled, with the tokens that it has."""
        for seq in self._scheduler.live():
            self._outbox.send(seq, "cancelled")

    def check(self) -> None:
        """Raise unless requests can be served."""
        self._health.check()

    @property
    def is_healthy(self) -> bool:
        return self._health.failure is None and not self._health.is_closed

    def name_version(self, version: int) -> None:
        """Declare the loaded weights to be this version of the first policy, as a trainer does when it joins."""
        self._updates.name_version(version)

    async def run(self) -> None:
        """Run the step loop until `close`. An error in a step fails every request and is raised from here."""
        try:
            while not self._health.is_closed:
                if self._is_frozen or not self._scheduler.has_work:
                    self._stepper.drain()
                    self._wake.clear()
                    self._stands.set()
                    await self._wake.wait()
                    self._stands.clear()
                    continue
                started = time.perf_counter()
                await self._until_due()
                self._stepper.step(self.versions)
                self._num_steps += 1
                step_s = time.perf_counter() - started
                self._busy_s += step_s
                await self._let_others_run(step_s)
        except asyncio.CancelledError:
            self._updates.fail(PenstockError(f"{self.name} was stopped"))
            raise
        except BaseException as error:
            self._updates.fail(error)
            raise
        finally:
            self._stands.set()  # wakes `freeze` and `finish_running`: nothing more will be computed

    async def _let_others_run(self, step_s: float) -> None:
        """Yield to the event loop, several times after a long step: a message needs as many turns of the loop to
        get from its socket to the scheduler, and would be one step late for each."""
        for _ in range(LONG_STEP_TURNS if step_s > LONG_STEP_S else 1):
            await asyncio.sleep(0)

    def progress(self) -> int | None:
        """Return the number of steps so far, or None while there is nothing to compute."""
        return None if self._is_frozen or not self._scheduler.has_work else self._num_steps

    async def _until_due(self) -> None:
        """Let other tasks run until the next step would not have to wait for a busy device."""
        while not (self._stepper.is_due or self._health.is_closed):  # noqa: ASYNC110  (nothing wakes us when a GPU is done)
            await asyncio.sleep(LOOK_AGAIN_S)

    def expect_adapter(self, layers: Iterable[str], rank: int) -> None:
        """Make room for adapters of these layers before `warm_up`, so that the first to arrive changes no graph."""
        self._adapters.expect(layers, rank)

    def warm_up(self) -> None:
        """Capture the graphs of a full batch on a GPU, so that no request has to wait for one."""
        self._stepper.warm_up()

    def live_tokens(self) -> list[int]:
        """Return the number of tokens of each sequence that is being computed."""
        return [seq.num_tokens + seq.num_pending for seq in self._scheduler.running]

    def newest_version(self, policy: str = DEFAULT_POLICY) -> int:
        """Return the version of a policy's newest tokens, including tokens that only the device has yet."""
        return self._stepper.newest_version(policy)

    @property
    def routing(self) -> RoutingShape | None:
        """Return the shape of the routes that are recorded, or None if none are."""
        return self._runner.routes.shape if self._runner.routes is not None else None

    @property
    def uses_graphs(self) -> bool:
        """Return whether decode steps run as CUDA graphs: on a GPU, unless a capture has failed."""
        return self._stepper.uses_graphs

    def forget_cache(self) -> None:
        """Drop everything that is cached only for reuse. Blocks of running sequences stay."""
        self._updates.forget_cache()

    def _open_stepper(self, device: "Device | None") -> Stepper:
        if device is None:
            return HostStepper(self._scheduler, self._runner, self._outbox, self.versions)
        from penstock.engines.embedded.cuda.device_stepper import DeviceStepper

        return DeviceStepper(self._scheduler, device, self._outbox)

    def _sequence(self, request: GenerateRequest) -> Sequence:
        self._arrivals += 1
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(2**63))
        return sequence_of(
            request, arrival=self._arrivals, max_context=self._runner.max_context, seed=seed % 2**64
        )
