"""One side of `python -m benchmarks colocated`: an engine that decodes or a trainer that steps, without end.

It is told what to do by lines on its input: `work` begins and answers when work is in full swing, `mark` sets
the clock to the end of the present unit of work, `report` answers with the rate since then, `rest` stops; the
end of the input ends it. A unit is one optimizer step, or what the engine does between two looks at its
counters.
"""

import asyncio
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.bench.shapes import make_shape
from penstock.bench.train import make_row
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.text_generation import FixedWeights
from penstock.models.published import published_tensors
from penstock.records import GenerateRequest, SamplingParams
from penstock.sync.cuda_ipc import CudaIpcPublisher
from penstock.trainer.config import TrainerConfig
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.optimizers.optimizer import MasterAdamW

LOOK_S = 0.001
"""Between two looks of the engine's side at its counters while it waits for a unit to end."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides do, as the first line of their input says it."""

    shape: str
    device: str
    batch: int
    """Sequences that the engine decodes at once."""
    prompt_tokens: int
    new_tokens: int
    train_tokens: int
    """Tokens of one optimizer step, packed from sequences of `train_length`."""
    train_length: int
    compiled: bool = False
    room_tokens: int = 0
    """Longest sequence that the engine's cache has room for, in every place of its batch at once."""


@dataclass(frozen=True, slots=True)
class Moment:
    """How much was done when a unit ended."""

    tokens: float
    units: float
    seconds: float


def follow(put: Callable[[str | None], object]) -> None:
    """Hand over the lines of the input as they come, and None when it has ended."""

    def read() -> None:
        for line in sys.stdin:
            put(line.strip())
        put(None)

    threading.Thread(target=read, daemon=True).start()


class EngineSide:
    """The embedded engine with a full batch: a request that ends is followed by the next. The first ones are of
    all lengths, so that the mean context is the same at any time."""

    def __init__(self, work: Work) -> None:
        on_gpu = work.device != "cpu"
        model = make_shape(work.shape, work.device, torch.bfloat16 if on_gpu else torch.float32)
        longest = max(work.prompt_tokens + work.new_tokens + 32, work.room_tokens)
        config = EngineConfig(
            device=work.device,
            max_context=longest,
            embedded=EmbeddedConfig(
                max_batch=work.batch,
                kv_tokens=work.batch * longest,
                prefill_chunk=4096,
                prefix_cache=False,
                keep_finished=0,
                compile="on" if work.compiled else "off",
            ),
        )
        self._work = work
        self._engine = EmbeddedEngine(model, config=config, receiver=FixedWeights())
        self._rng = np.random.default_rng(0)
        self._vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
        self._numbers = itertools.count()

    async def serve(self) -> None:
        lines: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        follow(lambda line: loop.call_soon_threadsafe(lines.put_nowait, line))
        marked = Moment(0, 0, 0)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._engine.run())
            clients = self._begin(group)
            await self._full_swing()
            await self._rest(clients)
            say({"ready": True})
            while (line := await lines.get()) is not None:
                if line == "work":
                    clients = self._begin(group)
                    await self._full_swing()
                    say({"works": True})
                elif line == "mark":
                    marked = await self._end_of_unit()
                elif line == "report":
                    say(rate(marked, await self._end_of_unit()) | memory(self._work.device))
                elif line == "rest":
                    await self._rest(clients)
                    say({"rests": True})
            await self._rest(clients)
            await self._engine.close()

    def _begin(self, group: asyncio.TaskGroup) -> "list[asyncio.Task[None]]":
        return [group.create_task(self._client()) for _ in range(self._work.batch)]

    async def _rest(self, clients: "list[asyncio.Task[None]]") -> None:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self) -> None:
        """One place in the batch."""
        new_tokens = int(self._rng.integers(1, self._work.new_tokens + 1))
        while True:
            number = next(self._numbers)
            prompt = self._rng.integers(0, self._vocabulary, self._work.prompt_tokens, dtype=np.int32)
            request = GenerateRequest(
                id=str(number),
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=new_tokens, temperature=1.0, seed=number),
                chunk_tokens=self._work.new_tokens,
            )
            async for _ in self._engine.generate(request):
                pass
            new_tokens = self._work.new_tokens

    async def _full_swing(self) -> None:
        """Until the batch is full and has decoded for a while: kernels are compiled, graphs are captured."""
        full = self._work.batch - self._work.batch // 8
        while (await self._engine.report()).num_running < full:  # noqa: ASYNC110 as below
            await asyncio.sleep(LOOK_S)
        await self._past((await self._now()).tokens + 16 * self._work.batch)

    async def _end_of_unit(self) -> Moment:
        return await self._past((await self._now()).tokens)

    async def _past(self, tokens: float) -> Moment:
        while (now := await self._now()).tokens <= tokens:  # noqa: ASYNC110 the engine tells its counters only
            await asyncio.sleep(LOOK_S)
        return now

    async def _now(self) -> Moment:
        counters = (await self._engine.report()).counters
        return Moment(counters["tokens"], counters["steps"], time.perf_counter())


class TrainerSide:
    """Forward, backward and optimizer update of one packed row, as the trainer does them."""

    def __init__(self, work: Work) -> None:
        on_gpu = work.device != "cpu"
        config = TrainerConfig(
            dtype="bfloat16" if on_gpu else "float32",
            logprob_chunk_tokens=4096 if on_gpu else 256,
            checkpointing="selective",
        )
        model: Any = make_shape(work.shape, work.device, torch.float32)
        self._tokens = work.train_tokens
        self._device = work.device
        self._optimizer = MasterAdamW(model, config)
        self._policy = PackedModel(
            model,
            chunk_tokens=config.logprob_chunk_tokens,
            checkpointing=config.checkpointing,
            compiled=work.compiled,
        )
        if on_gpu:  # as in a run, what is published to the engine lies beside it
            self._publisher = CudaIpcPublisher(published_tensors(model))
        self._row = make_row(model.config.vocab_size, work.train_tokens, work.train_length, work.device)
        self._directions = torch.randn(work.train_tokens, device=work.device) / work.train_tokens

    def serve(self) -> None:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        follow(lines.put)
        for _ in range(2):
            self._step()
        say({"ready": True})
        working, steps, marked = False, 0, Moment(0, 0, 0)
        while (line := "" if working and lines.empty() else lines.get()) is not None:
            if line == "work":
                working = True
            elif line == "rest":
                working = False
                say({"rests": True})
            if not working:
                continue
            self._step()
            steps += 1
            now = Moment(steps * self._tokens, steps, time.perf_counter())
            if line == "work":
                say({"works": True})
            elif line == "mark":
                marked = now
            elif line == "report":
                say(rate(marked, now) | memory(self._device))

    def _step(self) -> None:
        (self._policy(self._row).logprobs * self._directions).sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.update(1e-6, self._optimizer.gradient_norm())  # the norm waits for the device


def rate(begin: Moment, end: Moment) -> dict[str, float]:
    seconds = end.seconds - begin.seconds
    units = end.units - begin.units
    return {
        "tokens_per_s": (end.tokens - begin.tokens) / seconds,
        "step_ms": seconds / units * 1e3 if units else 0.0,
        "seconds": seconds,
    }


def memory(device: str) -> dict[str, float]:
    """GB that this process has taken at most, and that are taken on the whole GPU."""
    if device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
        "card_used_gb": (total - free) / 1e9,
        "card_gb": total / 1e9,
    }


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(role: str) -> None:
    work = msgspec.json.decode(sys.stdin.readline(), type=Work)
    if work.device == "cpu":
        torch.set_num_threads(1)
    if role == "engine":
        asyncio.run(EngineSide(work).serve())
    else:
        TrainerSide(work).serve()


if __name__ == "__main__":
    main(sys.argv[1])
