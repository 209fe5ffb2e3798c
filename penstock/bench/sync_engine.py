"""The engine's side of `penstock bench sync`: the embedded engine, with sequences that decode without end.

An update is *fresh* when a token has been drawn with it, and *seen* when such a token is in the hands of a
caller: on a GPU when the window of steps that drew it has ended.
"""

import asyncio
import gc
import json
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from penstock.bench.shapes import make_shape
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.interfaces import WeightReceiver
from penstock.sync.cuda_ipc import CudaIpcReceiver
from penstock.sync.shared_memory import SharedMemoryReceiver
from penstock.types import GenerateRequest, SamplingParams, WeightUpdate

PROMPT, CONTEXT = 16, 2048
SMALL_CONTEXT = 96
"""On a CPU, where only the logic is looked at."""
LOOK_EVERY_S = 1e-4


class Watched:
    """One of the sequences, whose tokens are looked at one by one: since when is there one of which version."""

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


async def serve(transport: str, shape: str, device: str, batch: int) -> None:
    """Answer updates until the input ends."""
    on_gpu = device != "cpu"
    context = CONTEXT if on_gpu else SMALL_CONTEXT
    model: Any = make_shape(shape, device, torch.bfloat16 if on_gpu else torch.float32)
    config = EngineConfig(
        max_batch=batch,
        max_context=context,
        kv_tokens=batch * context,
        prefix_cache=False,
        keep_finished=0,
        compile="on" if on_gpu else "off",
        device=device,
        dtype="bfloat16" if on_gpu else "float32",
    )
    receiver: WeightReceiver = CudaIpcReceiver() if transport == "cuda_ipc" else SharedMemoryReceiver()
    engine = EmbeddedEngine(model, config=config, receiver=receiver, version=-1)
    engine.warm_up()
    say({"ready": True})
    updates = reading()
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
        while (update := await asyncio.to_thread(updates.get)) is not None:
            say(await take(engine, update, watched))
        for task in tasks:
            task.cancel()


async def take(engine: EmbeddedEngine, update: WeightUpdate, watched: Watched) -> dict[str, float]:
    first = FirstToken(engine, update.version)
    with first:
        receipt = await engine.update(update)
        seen_at = await watched.until(update.version)
    return {
        "stall_ms": receipt.stall_s * 1e3,
        "verify_ms": receipt.verify_s * 1e3,
        "fresh_at": min(first.at, seen_at),
        "seen_at": seen_at,
    }


class FirstToken:
    """When it was drawn, of a version: a thread looks from time to time while the block runs."""

    def __init__(self, engine: EmbeddedEngine, version: int) -> None:
        self._engine = engine
        self._version = version
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.at = float("inf")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            if self._engine.newest_version >= self._version:
                self.at = time.monotonic()
                return


async def decode(
    engine: EmbeddedEngine, number: int, vocabulary: int, context: int, watched: Watched
) -> None:
    """One sequence after another, for as long as this is let."""
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


def reading() -> "queue.SimpleQueue[WeightUpdate | None]":
    """Waits for the word to begin. Then updates as they come in, a line each; None when the input has ended."""
    updates: queue.SimpleQueue[WeightUpdate | None] = queue.SimpleQueue()
    sys.stdin.buffer.readline()

    def read() -> None:
        decoder = msgspec.json.Decoder(WeightUpdate)
        for line in sys.stdin.buffer:
            updates.put(decoder.decode(line))
        updates.put(None)

    threading.Thread(target=read, daemon=True).start()
    return updates


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
