"""The embedded engine: a Hugging Face model, our paged cache, and an asyncio shell around one step loop.

    generate ─► scheduler ─► forward ─► draw ─► deliver ─► chunks
                    ▲                              │
                    └──────────────────────────────┘

Everything happens on one thread. `run` executes one step at a time and yields to the event loop in
between, so whatever another task does, an update of the weights among it, falls between two forward passes.
On a GPU a step is launched ahead and read later (`embedded.cuda.device`); an update first takes all that is
in flight.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from penstock.engines.config import EngineConfig
from penstock.engines.embedded.blocks import BlockPool
from penstock.engines.embedded.delivery import Stream, cut_chunk, end_within, finish_reason
from penstock.engines.embedded.prefix import PrefixCache
from penstock.engines.embedded.runner import ModelRunner
from penstock.engines.embedded.sampler import Drawn, draw, draws_on_device
from penstock.engines.embedded.scheduler import Batch, Scheduler
from penstock.engines.embedded.sequence import Sequence, sequence_of
from penstock.engines.embedded.validation import check_request
from penstock.errors import PenstockError
from penstock.interfaces import Tokenizer, WeightReceiver
from penstock.types import (
    DEFAULT_POLICY,
    Chunk,
    EngineReport,
    FinishReason,
    GenerateRequest,
    UpdateReceipt,
    WeightUpdate,
)

if TYPE_CHECKING:
    from penstock.engines.embedded.cuda.device import Device

CAPABILITIES = (
    "logprobs",
    "versions",
    "greedy",
    "seed",
    "penalties",
    "logit_bias",
    "forks",
    "prefix_cache",
    "sampling_mask",
    "recompute_kv",
)


LONG_STEP_S, LONG_STEP_TURNS = 0.005, 6
MAX_IN_FLIGHT = 2
"""Launches on a GPU: one that runs, and one behind it."""
LOOK_AGAIN_S = 0.0005
"""How often a launch in flight is looked at."""
MAX_PROMPTS_IN_A_ROW = 4
"""Passes over prompts before sequences that decode have their turn."""


class EmbeddedEngine:
    """Serves one policy. Its owner runs `run()` in a task group; requests wait until it does."""

    def __init__(
        self,
        model: nn.Module,
        *,
        config: EngineConfig,
        receiver: WeightReceiver,
        tokenizer: Tokenizer | None = None,
        name: str = "engine0",
        version: int = 0,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        self.name = name
        self.config = config
        self.policy = policy
        self.version = version
        self._runner = ModelRunner(model, config)
        self._device = self._runner.open_device(config)
        self._parameters = dict(model.named_parameters())
        self._receiver = receiver
        self._tokenizer = tokenizer
        pool = BlockPool(self._runner.num_blocks, config.block_size)
        cache = PrefixCache(
            pool, enabled=config.prefix_cache, keep_finished=config.keep_finished, version=version
        )
        self._scheduler = Scheduler(cache, max_batch=config.max_batch, prefill_chunk=config.prefill_chunk)
        self._streams: dict[str, Stream] = {}
        self._seeds = np.random.default_rng(config.seed)
        self._arrivals = 0
        self._needs_host = 0
        """Requests that a device cannot draw for."""
        self._prompts_in_a_row = 0
        self._has_launched = False
        self._wake = asyncio.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._counters = dict.fromkeys(
            ("busy_s", "tokens", "requests", "steps", "prefill_tokens", "cached_tokens", "preemptions"), 0.0
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks of the request's output. Closing the iterator cancels the request."""
        self._refuse_if_down()
        check_request(
            request,
            policy=self.policy,
            vocab_size=self._runner.vocab_size,
            max_context=self._runner.max_context,
            cache_tokens=self._runner.num_blocks * self.config.block_size,
            has_tokenizer=self._tokenizer is not None,
            is_known=request.id in self._streams,
        )
        seq = self._sequence(request)
        self._needs_host += not draws_on_device(seq)
        stream = self._streams[request.id] = Stream()
        self._scheduler.add(seq)
        self._counters["requests"] += 1
        self._wake.set()
        try:
            while True:
                chunk = await stream.next()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._streams.pop(request.id, None)
            self._needs_host -= not draws_on_device(seq)
            if self._scheduler.find(request.id) is seq:
                self._scheduler.cancel(seq)

    async def update(self, update: WeightUpdate) -> UpdateReceipt:
        """Take new weights, here and now: no forward pass can be under way.

        When the receiver raises, live parameters may be half old and half new: requests fail with that
        error until a later update succeeds."""
        if update.policy != self.policy:
            raise PenstockError(
                f"{self.name} serves policy {self.policy!r}, got an update of {update.policy!r}"
            )
        if update.version <= self.version:
            raise PenstockError(
                f"{self.name} serves version {self.version}, got an update to {update.version}"
            )
        self._drain()
        started = time.perf_counter()
        try:
            verify_s = self._receiver.receive(update, self._parameters)
        except BaseException as error:
            self._fail(error)
            raise
        self._failure = None
        self.version = update.version
        self._scheduler.new_version(update.version, recompute_kv=update.recompute_kv)
        stall_s = time.perf_counter() - started
        return UpdateReceipt(policy=self.policy, version=self.version, stall_s=stall_s, verify_s=verify_s)

    async def report(self) -> EngineReport:
        scheduler = self._scheduler
        return EngineReport(
            name=self.name,
            versions={self.policy: self.version},
            capabilities=CAPABILITIES + (("stop_strings",) if self._tokenizer is not None else ()),
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            max_context=self._runner.max_context,
            counters={
                **self._counters,
                "free_blocks": float(scheduler.cache.pool.num_free),
                "num_blocks": float(self._runner.num_blocks),
            },
        )

    async def close(self) -> None:
        """Stop serving: every request ends as cancelled, with the tokens that it has. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        for seq in self._scheduler.live():
            self._end(seq, "cancelled")
        self._receiver.close()

    async def run(self) -> None:
        """The step loop: until `close`. An error in a step fails every request and leaves from here."""
        try:
            while not self._closed:
                if not self._scheduler.has_work:
                    self._drain()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                started = time.perf_counter()
                await self._until_due()
                self.step()
                await self._let_others_run(time.perf_counter() - started)
        except asyncio.CancelledError:
            self._fail(PenstockError(f"{self.name} was stopped"))
            raise
        except BaseException as error:
            self._fail(error)
            raise

    async def _let_others_run(self, step_s: float) -> None:
        """A message takes several turns of the event loop from its socket to the scheduler. After a long
        step it gets them at once, so that it is not one step late per turn."""
        for _ in range(LONG_STEP_TURNS if step_s > LONG_STEP_S else 1):
            await asyncio.sleep(0)

    def step(self) -> None:
        """One forward pass, and one token for every sequence that it brought up to date. On a GPU: take what
        was launched two steps ago and launch what comes next. A request that only the host can draw for makes
        every pass wait for the host."""
        started = time.perf_counter()
        device = self._device
        if device is None or self._needs_host:
            self._drain()
            self._pass()
        else:
            if self._must_take(device):
                self._take(device)
            self._has_launched = self._launch(device)
        self._counters["busy_s"] += time.perf_counter() - started

    def _pass(self) -> None:
        batch = self._scheduler.schedule()
        logits = self._device.forward(batch) if self._device is not None else self._runner.forward(batch)
        drawn = self._scheduler.commit(batch)
        if drawn:
            self._deliver(logits, drawn)
        self._count(batch)

    def _must_take(self, device: "Device") -> bool:
        return device.num_in_flight >= MAX_IN_FLIGHT or (device.num_in_flight > 0 and not self._has_launched)

    async def _until_due(self) -> None:
        """Let others run until what the next step must read is there; the device is busy meanwhile."""
        started, device = time.perf_counter(), self._device
        while (  # noqa: ASYNC110  (nothing wakes us when a GPU is done)
            device is not None and self._must_take(device) and not (device.is_ready or self._closed)
        ):
            await asyncio.sleep(LOOK_AGAIN_S)
        self._counters["busy_s"] += time.perf_counter() - started

    def _launch(self, device: "Device") -> bool:
        """Queue a pass over prompts or a window of decode steps. False when there is nothing to do before what
        is in flight has been taken."""
        scheduler, is_idle = self._scheduler, device.num_in_flight == 0
        if self._prompts_in_a_row < MAX_PROMPTS_IN_A_ROW and scheduler.wants_prompts(join_at=device.join_at):
            batch = scheduler.schedule_prompts(may_preempt=is_idle)
            if batch is None:
                return False
            if batch.spans:
                drawn = scheduler.commit(batch)
                device.launch_prompts(batch, drawn, _logit_rows([span for span, _ in drawn]), self.version)
                self._count(batch)
                self._prompts_in_a_row += 1
                return True
        self._prompts_in_a_row = 0
        ready = scheduler.ready()
        if not ready:
            return False
        steps = min(device.window, max(seq.limit - seq.num_tokens - seq.num_pending for seq in ready))
        copies = scheduler.reserve(ready, steps, may_preempt=is_idle)
        ready = [seq for seq in ready if seq.is_running]
        if copies is None or not ready:
            return False
        device.launch_window(ready, steps, copies, self.version)
        self._counters["steps"] += steps
        return True

    def _take(self, device: "Device") -> None:
        """Read the oldest launch, and keep what each sequence drew up to where it ends."""
        drawn, version = device.collect()
        for each in drawn:
            seq = each.seq
            if not seq.is_running:
                continue
            count, reason = end_within(seq, each.tokens, self._tokenizer)
            seq.tokens.extend(each.tokens[:count])
            seq.logprobs.extend(each.logprobs[:count])
            seq.versions.extend([version] * count)
            if each.masks is not None:
                seq.masks.extend(each.masks[:count])
            self._counters["tokens"] += count
            if reason is not None:
                seq.num_computed = min(seq.num_computed, seq.num_tokens - 1)
            self._scheduler.taken(seq)
            if reason is not None:
                self._end(seq, reason)
            elif seq.num_output - seq.num_sent >= seq.request.chunk_tokens:
                self._send(seq, None)

    def _drain(self) -> None:
        """Take everything that is in flight: from here the host knows all there is."""
        if self._device is None:
            return
        while self._device.num_in_flight:
            self._take(self._device)
        self._device.reset()

    def _count(self, batch: Batch) -> None:
        counters = self._counters
        counters["steps"] += 1
        counters["prefill_tokens"] += batch.num_prefill
        counters["cached_tokens"] += batch.num_cached
        counters["preemptions"] += batch.num_preempted

    def warm_up(self) -> None:
        """On a GPU: capture the graphs of a full batch, so that no request has to wait for one."""
        if self._device is not None:
            self._device.warm_up()

    def live_tokens(self) -> list[int]:
        """Tokens of each sequence that is being computed."""
        return [seq.num_tokens + seq.num_pending for seq in self._scheduler.running]

    def forget_cache(self) -> None:
        """Drop everything that is only kept for reuse. What running sequences hold stays."""
        self._scheduler.cache.clear_kept()
        self._scheduler.cache.pool.clear_index()

    def _deliver(self, logits: torch.Tensor, drawn: list[tuple[int, Sequence]]) -> None:
        """Draw a token for each sequence and send what is due."""
        sequences = [seq for _, seq in drawn]
        rows = _logit_rows([span for span, _ in drawn])
        if len(rows) != logits.shape[0]:
            logits = logits[rows]
        result = draw(logits, sequences)
        if self._device is not None:
            self._draw_on_device(self._device, logits, sequences, result)
        self._counters["tokens"] += len(sequences)
        for row, seq in enumerate(sequences):
            seq.tokens.append(result.tokens[row])
            seq.logprobs.append(result.logprobs[row])
            seq.versions.append(self.version)
            if seq.request.record_sampling_mask:
                seq.masks.append(result.kept.get(row, _NOTHING_CUT))
            reason = finish_reason(seq, self._tokenizer)
            if reason is not None:
                self._end(seq, reason)
            elif seq.num_output - seq.num_sent >= seq.request.chunk_tokens:
                self._send(seq, None)

    def _draw_on_device(
        self, device: "Device", logits: torch.Tensor, sequences: list[Sequence], result: Drawn
    ) -> None:
        """A seed gives the same tokens whatever else is in the batch: also when another request needs the
        host, rows that do not are drawn as the device draws them."""
        rows = [
            row
            for row, seq in enumerate(sequences)
            if draws_on_device(seq) and not seq.request.sampling.truncates
        ]
        if rows:
            drawn = device.draw(logits[rows].contiguous(), [sequences[row] for row in rows])
            for row, token, logprob in zip(rows, *drawn, strict=True):
                result.tokens[row], result.logprobs[row] = token, logprob

    def _send(self, seq: Sequence, reason: FinishReason | None) -> None:
        chunk = cut_chunk(seq, reason, vocab_size=self._runner.vocab_size)
        self._streams[seq.request.id].put(chunk)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        self._send(seq, reason)
        if reason == "cancelled":
            self._scheduler.cancel(seq)
        else:
            self._scheduler.finish(seq)

    def _sequence(self, request: GenerateRequest) -> Sequence:
        self._arrivals += 1
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(2**63))
        return sequence_of(
            request, arrival=self._arrivals, max_context=self._runner.max_context, seed=seed % 2**64
        )

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for seq in self._scheduler.live():
            self._scheduler.cancel(seq)
        for stream in self._streams.values():
            stream.fail(error)

    def _refuse_if_down(self) -> None:
        if self._closed:
            raise PenstockError(f"{self.name} is closed")
        if self._failure is not None:
            raise PenstockError(f"{self.name} has failed: {self._failure}") from self._failure


_NOTHING_CUT = np.zeros(0, dtype=np.int32)


def _logit_rows(spans: list[int]) -> list[int]:
    """The logits row of each drawn token: spans that draw are numbered without gaps, followers repeat."""
    rows: list[int] = []
    for at, span in enumerate(spans):
        rows.append(0 if at == 0 else rows[-1] + (span != spans[at - 1]))
    return rows
