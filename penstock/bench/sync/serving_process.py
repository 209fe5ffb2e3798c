"""Runs the engine's side of `penstock bench sync`: the embedded engine, with sequences that decode without end.

It reads a token for HTTP, reports that it is ready, and begins to decode on command. After that, each line is a
`Delivery`, or empty to ask how many tokens there are. An update is *fresh* when a token has been sampled with it,
and *seen* when a caller has such a token. On a GPU that is when the window of steps that sampled it has ended.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from penstock.bench.shapes import make_shape
from penstock.bench.sync.endless_decoding import EndlessDecoding
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.models.load import load_model
from penstock.records import DEFAULT_POLICY, Interrupt, WeightUpdate
from penstock.sync.transports import AnyReceiver, Rendezvous
from penstock.worker.quiet import quieten

FIRST_VERSION = -1
"""The version that is served before the first update."""
COUNTED = ("tokens", "discarded_tokens", "recomputed_tokens")
LOOK_EVERY_S = 1e-4
TIMEOUT_S = 60.0
LONGEST_LINE = 1 << 26


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Configures the engine's process."""

    model: str
    """A shape, or a folder."""
    device: str
    batch: int
    resume_kv: Literal["keep", "recompute"] = "keep"
    rank: int = 0
    """The largest rank of the adapters that will come; 0 for none."""
    context: int = 2048
    threads: int = 0
    """Threads of torch; 0 keeps the default."""
    staggered: bool = False
    """Whether sequences end one after another, as in a run; otherwise all at once."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Carries an update, and how it is to be taken."""

    update: WeightUpdate
    interrupt: Interrupt = "inflight"
    drained: bool = False


async def serve(
    serving: Serving,
    receiver: AnyReceiver,
    next_line: Callable[[], Awaitable[bytes]],
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Answer until the input ends, which reads as a line of no bytes. The first line is the command to begin."""
    if serving.threads:
        torch.set_num_threads(serving.threads)
    quieten()
    engine = open_engine(serving, receiver)
    engine.warm_up()
    # The event loop must not delay the thread that polls for the first token.
    sys.setswitchinterval(LOOK_EVERY_S)
    say({"ready": True, "capabilities": (await engine.report()).capabilities})
    await next_line()
    async with asyncio.TaskGroup() as group:
        decoding = EndlessDecoding(engine, serving.batch, serving.context, staggered=serving.staggered)
        tasks = [group.create_task(engine.run())]
        tasks += [group.create_task(each) for each in decoding.sequences()]
        await decoding.until(FIRST_VERSION)
        gc.collect()
        gc.freeze()  # as a worker does when it has started
        say({"works": True})
        decoder = msgspec.json.Decoder(Delivery)
        while line := await next_line():
            if line.strip():
                say(await take(engine, decoder.decode(line), decoding))
            else:
                say(await count(engine))
        for task in tasks:
            task.cancel()


def open_engine(serving: Serving, receiver: AnyReceiver) -> EmbeddedEngine:
    on_gpu = serving.device != "cpu"
    if Path(serving.model).is_dir():
        model: Any = load_model(serving.model, device=serving.device, dtype="bfloat16")
    else:
        model = make_shape(serving.model, serving.device, torch.bfloat16)
    config = EngineConfig(
        max_context=serving.context,
        device=serving.device,
        dtype="bfloat16",
        embedded=EmbeddedConfig(
            max_batch=serving.batch,
            kv_tokens=serving.batch * serving.context,
            prefix_cache=False,
            keep_finished=0,
            compile="on" if on_gpu else "off",
            resume_kv=serving.resume_kv,
            max_adapters=1 if serving.rank else 0,
            max_adapter_rank=max(1, serving.rank),
        ),
    )
    return EmbeddedEngine(model, config=config, receiver=receiver, versions={DEFAULT_POLICY: FIRST_VERSION})


async def take(engine: EmbeddedEngine, delivery: Delivery, decoding: EndlessDecoding) -> dict[str, float]:
    """Take an update, and wait for a token that was sampled with it."""
    told_at = time.monotonic()
    before = await count(engine)
    update = delivery.update
    if delivery.drained:
        await decoding.drain()
    receipt = await engine.update(update, delivery.interrupt)
    decoding.resume()
    fresh_at = await asyncio.to_thread(first_token, engine, update.version)
    seen_at = await decoding.until(update.version)
    after = await count(engine)
    return {
        "told_at": told_at,
        "stage_ms": receipt.stage_s * 1e3,
        "stall_ms": receipt.stall_s * 1e3,
        "verify_ms": receipt.verify_s * 1e3,
        "fresh_at": min(fresh_at, seen_at),
        "seen_at": seen_at,
        **{key: after[key] - before[key] for key in after},
    }


async def count(engine: EmbeddedEngine) -> dict[str, float]:
    """Return the counters so far. Discarded tokens are sampled again."""
    counters = (await engine.report()).counters
    return {"at": time.monotonic()} | {name: counters.get(name, 0.0) for name in COUNTED}


def first_token(engine: EmbeddedEngine, version: int) -> float:
    """Return when the first token of a version was sampled. A thread polls for it, because the event loop may be
    busy."""
    until = time.monotonic() + TIMEOUT_S
    while engine.newest_version() < version:
        if time.monotonic() > until:
            raise TimeoutError(f"no token of version {version} within {TIMEOUT_S:.0f} s")
        time.sleep(LOOK_EVERY_S)
    return time.monotonic()


async def reading() -> asyncio.StreamReader:
    """Read the standard input through the event loop, as a worker reads its channel."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def main(serving: Serving) -> None:
    lines = await reading()
    token = (await lines.readline()).decode().strip()
    receiver = AnyReceiver(Rendezvous(device=serving.device, token=token))
    await serve(serving, receiver, lines.readline, lambda answer: print(json.dumps(answer), flush=True))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1].encode(), type=Serving)))
