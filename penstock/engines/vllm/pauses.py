"""`sync.interrupt` as vLLM's pauses: what happens to answers in flight when weights change.

                   the pause                       answers in flight
inflight           keep, the cache stays           are frozen, and go on with their keys and values
inflight_recompute keep, the cache is cleared      are frozen, and compute their keys and values again
drain              wait                            end first; new requests wait meanwhile
abort_resume       abort                           are ended; the engine asks again from their prefix
abort_retry        abort                           are ended; the engine asks again from their prompt
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.weight_calls import HalfLoaded
from penstock.types import Interrupt

INTERRUPTS: tuple[Interrupt, ...] = get_args(Interrupt)
ABORTING: tuple[Interrupt, ...] = ("abort_resume", "abort_retry")
_QUERIES: dict[Interrupt, str] = {
    "inflight": "mode=keep&clear_cache=false",
    "inflight_recompute": "mode=keep&clear_cache=true",
    "drain": "mode=wait&clear_cache=true",
    "abort_resume": "mode=abort&clear_cache=true",
    "abort_retry": "mode=abort&clear_cache=true",
}


class Stall:
    """How long a server stood still."""

    def __init__(self) -> None:
        self.paused_at = 0.0
        self.pause_s = 0.0
        """How long it took to come to a stop."""
        self.stall_s = 0.0


@asynccontextmanager
async def paused(client: ServerClient, interrupt: Interrupt) -> AsyncIterator[Stall]:
    """While the block runs, the server computes nothing. It goes on afterwards, unless its weights are neither the
    old ones nor the new: then not another token may be sampled with them."""
    stall, started = Stall(), time.perf_counter()
    await client.post(f"/pause?{_QUERIES[interrupt]}")
    stall.paused_at = time.perf_counter()
    stall.pause_s = stall.paused_at - started
    try:
        yield stall
    except HalfLoaded:
        raise
    except BaseException:
        await client.post("/resume")
        raise
    await client.post("/resume")
    stall.stall_s = time.perf_counter() - stall.paused_at
