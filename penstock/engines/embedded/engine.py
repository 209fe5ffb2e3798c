"""The embedded engine: a Hugging Face model, our paged cache, and an asyncio shell around one step loop.

    generate ─► scheduler ─► forward ─► draw ─► deliver ─► chunks
                    ▲                              │
                    └──────────────────────────────┘

Everything happens on one thread. `run` executes one step at a time and yields to the event loop in
between, so whatever another task does, an update of the weights among it, falls between two forward passes.
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
from penstock.engines.embedded.sampler import draw, draws_plainly
from penstock.engines.embedded.scheduler import Scheduler
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
    from penstock.engines.embedded.cuda.decode import GraphDecoder

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
        self._decoder = self._runner.make_decoder(config)
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
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                started = time.perf_counter()
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
        """One forward pass, and one token for every sequence that it brought up to date; or, on a GPU, a
        window of decode steps."""
        started = time.perf_counter()
        if self._decoder is not None and self._decode_window(self._decoder):
            self._counters["busy_s"] += time.perf_counter() - started
            return
        batch = self._scheduler.schedule()
        logits = self._runner.forward(batch)
        drawn = self._scheduler.commit(batch)
        if drawn:
            self._deliver(logits, drawn)
        counters = self._counters
        counters["steps"] += 1
        counters["prefill_tokens"] += batch.num_prefill
        counters["cached_tokens"] += batch.num_cached
        counters["preemptions"] += batch.num_preempted
        counters["busy_s"] += time.perf_counter() - started

    def _decode_window(self, decoder: "GraphDecoder") -> bool:
        """Replay a window of decode steps, where every running sequence can be drawn on the device."""
        sequences = self._scheduler.decoding(join_at=decoder.join_at)
        if not sequences or not all(draws_plainly(seq) for seq in sequences):
            return False
        steps = min(decoder.window, max(seq.limit - seq.num_tokens for seq in sequences))
        self._runner.cache.copy_blocks(self._scheduler.reserve(steps))
        sequences = list(self._scheduler.running)
        if not sequences:
            return False
        drawn = decoder.run(sequences, steps)
        self._counters["steps"] += steps
        for row, seq in enumerate(sequences):
            self._take_window(seq, drawn.tokens[row], drawn.logprobs[row])
        return True

    def _take_window(self, seq: Sequence, tokens: list[int], logprobs: list[float]) -> None:
        """Keep what was drawn up to where the sequence ends."""
        count, reason = end_within(seq, tokens, self._tokenizer)
        seq.tokens.extend(tokens[:count])
        seq.logprobs.extend(logprobs[:count])
        seq.versions.extend([self.version] * count)
        self._counters["tokens"] += count
        self._scheduler.extend(seq, count)
        if reason is not None:
            self._end(seq, reason)
        elif seq.num_output - seq.num_sent >= seq.request.chunk_tokens:
            self._streams[seq.request.id].put(cut_chunk(seq, None))

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
                self._streams[seq.request.id].put(cut_chunk(seq, None))

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        self._streams[seq.request.id].put(cut_chunk(seq, reason))
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
