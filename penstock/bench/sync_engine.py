"""The engine's side of `penstock bench sync`: the embedded engine, with sequences that decode without end.

An update is *fresh* when a token has been sampled with it, and *seen* when a caller has such a token. On a GPU
that is when the window of steps that sampled it has ended.
"""

import asyncio
import gc
import json
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.bench.shapes import make_shape
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.sync.transports import AnyReceiver
from penstock.types import DEFAULT_POLICY, GenerateRequest, SamplingParams, WeightUpdate

PROMPT, CONTEXT = 16, 2048
SMALL_CONTEXT = 96
"""For a CPU, where only the logic is tested."""
LOOK_EVERY_S = 1e-4
PATIENCE_S = 60.0
LONGEST_LINE = 1 << 26


class Watched:
    """One of the sequences. It notes when the first token of each version was seen."""

    def __init__(self) -> None:
        self.since: dict[int, float] = {}
        self.changed = asyncio.Event()

    def saw(self, version: int) -> None:
        if version not in self.since:
            self.since[version] = time.monotonic()
            self.changed.set()

    async def until(self, version: int) -> float:
        while version not in self.since:
            self.changed.clear()
            await self.changed.wait()
        return self.since[version]


async def serve(shape: str, device: str, batch: int, rank: int = 0) -> None:
    """Answer updates until the input ends. `rank`: of an adapter that they may be of."""
    on_gpu = device != "cpu"
    context = CONTEXT if on_gpu else SMALL_CONTEXT
    model: Any = make_shape(shape, device, torch.bfloat16 if on_gpu else torch.float32)
    config = EngineConfig(
        max_context=context,
        device=device,
        dtype="bfloat16" if on_gpu else "float32",
        embedded=EmbeddedConfig(
            max_batch=batch,
            kv_tokens=batch * context,
            prefix_cache=False,
            keep_finished=0,
            compile="on" if on_gpu else "off",
            max_adapters=1 if rank else 0,
            max_adapter_rank=max(1, rank),
        ),
    )
    versions = {DEFAULT_POLICY: -1}
    engine = EmbeddedEngine(model, config=config, receiver=AnyReceiver(), versions=versions)
    engine.warm_up()
    sys.setswitchinterval(
        LOOK_EVERY_S
    )  # so that the event loop does not delay the thread that polls for the first token
    say({"ready": True})
    sys.stdin.buffer.readline()  # the word to begin
    lines = await reading()
    watched = Watched()
    vocabulary = int(model.config.vocab_size)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.run())]
        tasks += [
            group.create_task(decode(engine, number, vocabulary, context, watched)) for number in range(batch)
        ]
        await watched.until(-1)
        gc.collect()
        gc.freeze()  # as a worker does when it has started
        say({"works": True})
        decoder = msgspec.json.Decoder(WeightUpdate)
        while line := await lines.readline():
            say(await take(engine, decoder.decode(line), watched))
        for task in tasks:
            task.cancel()


async def take(engine: EmbeddedEngine, update: WeightUpdate, watched: Watched) -> dict[str, float]:
    told_at = time.monotonic()
    receipt = await engine.update(update)
    fresh_at = await asyncio.to_thread(first_token, engine, update.version)
    seen_at = await watched.until(update.version)
    return {
        "told_at": told_at,
        "stage_ms": receipt.stage_s * 1e3,
        "stall_ms": receipt.stall_s * 1e3,
        "verify_ms": receipt.verify_s * 1e3,
        "fresh_at": min(fresh_at, seen_at),
        "seen_at": seen_at,
    }


def first_token(engine: EmbeddedEngine, version: int) -> float:
    """When the first token of a version was sampled. A thread polls for it: the event loop is busy at times."""
    until = time.monotonic() + PATIENCE_S
    while engine.newest_version() < version:
        if time.monotonic() > until:
            raise TimeoutError(f"no token of version {version} within {PATIENCE_S:.0f} s")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic()


async def decode(
    engine: EmbeddedEngine, number: int, vocabulary: int, context: int, watched: Watched
) -> None:
    """One sequence after another, until cancelled."""
    prompt = np.arange(number, number + PROMPT, dtype=np.int32) % vocabulary
    is_watched = number == 0
    with suppress(asyncio.CancelledError):
        for turn in range(sys.maxsize):
            request = GenerateRequest(
                id=f"{number}-{turn}",
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=context - PROMPT, seed=turn),
                chunk_tokens=1 if is_watched else 64,
            )
            async for chunk in engine.generate(request):
                if is_watched and len(chunk.versions):
                    watched.saw(int(chunk.versions[-1]))


async def reading() -> asyncio.StreamReader:
    """What comes in, read by the event loop, as a worker reads its channel."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
