"""Brings new weights into a vLLM server by HTTP calls: stage beside generation, load while it is paused.

The server's part is `penstock.vllm_plugin`. It reports what happened instead of raising, since vLLM does not
survive an update that raises. `sync.interrupt` decides how the server pauses:

                   the pause                       running answers
inflight           keep, the cache stays           are frozen, then continue with their keys and values
inflight_recompute keep, the cache is cleared      are frozen, then recompute their keys and values
drain              wait                            end first; new requests wait meanwhile
abort_resume       abort                           are ended; the engine asks again from their prefix
abort_retry        abort                           are ended; the engine asks again from their prompt
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from penstock import errors
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import EngineLost, PenstockError
from penstock.records import Interrupt, WeightUpdate

LOOK_S = 0.02
"""How often workers are asked whether they have staged."""


class HalfLoaded(PenstockError):
    """An update failed while layers were being loaded, so the server can't be used any more."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Holds what the workers report of a load."""

    load_s: float
    verify_s: float
    unverified: tuple[str, ...]
    """Tensors that were verified only on arrival."""


class WeightCalls:
    """Makes the calls for weights to one server."""

    def __init__(self, client: ServerClient, *, interface: str = "", token: str = "") -> None:
        self._client = client
        self._init = {"interface": interface, "token": token}

    async def open(self, version: int) -> None:
        """Give the server what it needs to reach the trainer, and the version of its present weights."""
        await self._client.post("/init_weight_transfer_engine", {"init_info": self._init})
        await self.name_version(version)

    async def name_version(self, version: int) -> None:
        await self._client.post("/update_weight_version", {"new_version": str(version)})

    async def stage(self, update: WeightUpdate) -> None:
        """Let every worker fetch the update while the server continues to generate."""
        if not update.tensors:
            return
        try:
            answers = await self._client.ask_workers("penstock_stage", msgspec.json.encode(update).decode())
            while not all(each["is_done"] for each in answers):
                _raise_first(answers)
                await asyncio.sleep(LOOK_S)  # workers can't call us
                answers = await self._client.ask_workers("penstock_staged")
        except asyncio.CancelledError:
            await asyncio.shield(self.drop())
            raise
        _raise_first(answers)

    async def drop(self) -> None:
        """Discard the staged update."""
        await self._client.ask_workers("penstock_drop")

    async def load(self, update: WeightUpdate) -> Loaded:
        """Load the staged update while the server is paused. Raise `HalfLoaded` if the server can't be used any
        more; after any other error it serves its previous weights."""
        if not update.tensors:
            await self.name_version(update.version)
            return Loaded(0.0, 0.0, ())
        await self._start()
        try:
            outcomes = await self._load(update)
        except HalfLoaded:
            raise
        except PenstockError as error:
            raise HalfLoaded(f"it is unknown whether version {update.version} was loaded: {error}") from error
        _raise_first(outcomes)
        return Loaded(
            max(each["load_s"] for each in outcomes),
            max(each["verify_s"] for each in outcomes),
            tuple(outcomes[0]["unverified"]),
        )

    async def _start(self) -> None:
        """Begin an update in the server. This changes no weights."""
        try:
            await self._client.post("/start_weight_update")
        except EngineLost:
            raise
        except PenstockError:  # an earlier update was never finished
            await self._client.post("/finish_weight_update", {})
            await self._client.post("/start_weight_update")

    async def _load(self, update: WeightUpdate) -> list[dict[str, Any]]:
        client = self._client
        await client.post("/update_weights", {"update_info": {"version": update.version}})
        outcomes = await client.ask_workers("penstock_outcome")
        failed = [each for each in outcomes if each["kind"]]
        if any(not each["is_intact"] for each in failed):
            raise HalfLoaded(f"{client.name}: {failed[0]['message']}")
        await client.post("/finish_weight_update", {} if failed else {"weight_version": str(update.version)})
        return outcomes


def _raise_first(answers: list[dict[str, Any]]) -> None:
    """Raise the first error that a worker names, as our class of that name."""
    for answer in answers:
        if answer["kind"]:
            known = getattr(errors, answer["kind"], PenstockError)
            is_ours = isinstance(known, type) and issubclass(known, PenstockError)
            if is_ours:
                raise known(answer["message"])
            raise PenstockError(f"{answer['kind']}: {answer['message']}")


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
    """Records how long a server was paused."""

    def __init__(self) -> None:
        self.paused_at = 0.0
        self.pause_s = 0.0
        """How long the server took to come to a stop."""
        self.stall_s = 0.0


@asynccontextmanager
async def paused(client: ServerClient, interrupt: Interrupt) -> AsyncIterator[Stall]:
    """Keep the server paused while the block runs. It resumes afterwards, except when `HalfLoaded` leaves
    weights that are neither the old nor the new ones: no further token may be sampled with them."""
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
