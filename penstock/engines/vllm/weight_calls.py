"""The calls that bring new weights into a vLLM server: stage beside generation, load while it is paused.

The server's part is `penstock.vllm_plugin`. It answers with what happened instead of raising, since vLLM does not
survive an update that raises.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock import errors
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import EngineLost, PenstockError
from penstock.types import WeightUpdate

LOOK_S = 0.02
"""How often workers that stage are asked."""


class HalfLoaded(PenstockError):
    """An update failed while layers were being loaded: the server can't be used any more."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the workers say of a load."""

    load_s: float
    verify_s: float
    unverified: tuple[str, ...]
    """Tensors that were verified on arrival only."""


class WeightCalls:
    """To one server."""

    def __init__(self, client: ServerClient, *, interface: str = "", token: str = "") -> None:
        self._client = client
        self._init = {"interface": interface, "token": token}

    async def open(self, version: int) -> None:
        """Say where the trainer is, and the version of the weights that are there."""
        await self._client.post("/init_weight_transfer_engine", {"init_info": self._init})
        await self.name_version(version)

    async def name_version(self, version: int) -> None:
        await self._client.post("/update_weight_version", {"new_version": str(version)})

    async def stage(self, update: WeightUpdate) -> None:
        """Let every worker fetch the update. It goes on generating meanwhile."""
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
        """Give up what is staged."""
        await self._client.ask_workers("penstock_drop")

    async def load(self, update: WeightUpdate) -> Loaded:
        """While the server is paused. Raises `HalfLoaded` where it can't be used any more; after any other error it
        serves what it did."""
        if not update.tensors:
            await self.name_version(update.version)
            return Loaded(0.0, 0.0, ())
        await self._start()
        try:
            outcomes = await self._load(update)
        except HalfLoaded:
            raise
        except PenstockError as error:
            raise HalfLoaded(f"nobody knows whether version {update.version} was loaded: {error}") from error
        _raise_first(outcomes)
        return Loaded(
            max(each["load_s"] for each in outcomes),
            max(each["verify_s"] for each in outcomes),
            tuple(outcomes[0]["unverified"]),
        )

    async def _start(self) -> None:
        """Nothing is touched by this."""
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
    """The error that a worker names, as the one that it is here."""
    for answer in answers:
        if answer["kind"]:
            known = getattr(errors, answer["kind"], PenstockError)
            is_ours = isinstance(known, type) and issubclass(known, PenstockError)
            if is_ours:
                raise known(answer["message"])
            raise PenstockError(f"{answer['kind']}: {answer['message']}")
