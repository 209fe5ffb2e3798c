"""New weights for a server through vLLM's own transfer engines: this process fetches and verifies them, and
hands them on as vLLM's trainers do. `WeightCalls` is the same for our plugin.

    trainer ─► staged here, verified ─► paused: start, chunks by NCCL or CUDA IPC, finish ─► resumed
"""

import asyncio
import time
from typing import Any

import torch

from penstock.engines.checkpoint_names import as_checkpoint
from penstock.engines.vllm.native_senders import Sender
from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.weight_calls import HalfLoaded, Loaded, WeightCalls
from penstock.errors import PenstockError
from penstock.interfaces import WeightReceiver
from penstock.types import WeightUpdate


class NativeCalls(WeightCalls):
    """To one server. `receiver` reads what the trainer has published, into tensors on `device`."""

    def __init__(
        self, client: ServerClient, sender: Sender, receiver: WeightReceiver, *, device: str
    ) -> None:
        super().__init__(client)
        self._sender = sender
        self._receiver = receiver
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    async def open(self, version: int) -> None:
        await self._sender.open(self._client)
        await self.name_version(version)

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch the whole update. What is not the trainer's is refused here."""
        fetching = asyncio.get_running_loop().run_in_executor(None, self._fetch, update)
        try:
            self._tensors = await asyncio.shield(fetching)
        except asyncio.CancelledError:
            self._receiver.cancel()
            raise

    async def drop(self) -> None:
        self._tensors = {}

    async def load(self, update: WeightUpdate) -> Loaded:
        if not update.tensors:
            await self.name_version(update.version)
            return Loaded(0.0, 0.0, ())
        tensors, self._tensors = self._tensors, {}
        started = time.perf_counter()
        try:
            await self._client.post("/start_weight_update")  # from here on layers wait for new weights
            await self._sender.send(self._client, list(as_checkpoint(tensors.items())))
            await self._client.post("/finish_weight_update", {"weight_version": str(update.version)})
        except (PenstockError, RuntimeError, ExceptionGroup) as error:
            raise HalfLoaded(
                f"{self._client.name}: version {update.version} was not loaded whole: {_first(error)}"
            ) from error
        return Loaded(time.perf_counter() - started, 0.0, tuple(tensors))

    def _fetch(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
            for spec in update.tensors
        }
        staged = self._receiver.stage(update)
        try:
            self._receiver.load(staged, tensors)()
        finally:
            self._receiver.drop(staged)
        return tensors


def _first(error: Any) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    found: BaseException = error
    return found
