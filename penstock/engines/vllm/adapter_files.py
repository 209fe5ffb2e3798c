"""Brings adapters into a vLLM server, written as peft saves them, with a new folder and name for each version.

vLLM keys its KV cache by an adapter's path, so reusing a path would give stale prefixes. A request keeps the
adapter that it began with, and an adapter is removed when no request uses it.
"""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import PenstockError
from penstock.models.adapter_folder import CONFIG, PREFIX, TENSORS
from penstock.records import AdapterSpec, WeightUpdate
from penstock.records.interfaces import WeightReceiver

SLOTS = 2
"""Versions that a server holds at once: one for new requests, one for older requests that are still running."""


class AdapterFiles:
    """Holds the adapters of one policy on one server. `receiver` reads what the trainer has published."""

    def __init__(self, receiver: WeightReceiver, *, model: str, folder: str = "") -> None:
        self._receiver = receiver
        self._model = model
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-adapters-", dir=folder or None))
        self._present = ""
        self._users: dict[str, str] = {}
        self._loaded: list[str] = []
        self._changed = asyncio.Event()

    def begin(self, request_id: str) -> str:
        """Return the name of the adapter that this request runs with until `end`; "" if none was loaded yet."""
        self._users[request_id] = self._present
        return self._present

    def end(self, request_id: str) -> None:
        self._users.pop(request_id, None)
        self._changed.set()

    async def write(self, update: WeightUpdate) -> None:
        """Fetch the published adapter, verify it and write it to a folder of its own. Fetching may wait for the
        trainer, and cancelling ends that wait."""
        assert update.adapter is not None
        writing = asyncio.get_running_loop().run_in_executor(None, self._write, update, update.adapter)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._receiver.cancel()
            raise

    async def load(self, client: ServerClient, update: WeightUpdate) -> None:
        """Load the adapter into the server, for new requests to use. This waits until the server has a free
        slot, that is until requests with versions before the last one have ended."""
        name = f"{update.policy}@{update.version}"
        while len(self._loaded) >= SLOTS:
            await self._unload_unused(client)
            if len(self._loaded) >= SLOTS:
                self._changed.clear()
                await self._changed.wait()
        body = {"lora_name": name, "lora_path": str(self._at(update.version)), "load_inplace": True}
        await client.post("/v1/load_lora_adapter", body)
        self._loaded.append(name)
        self._present = name

    def forget(self) -> None:
        """Forget the loaded adapters, because the server is new or has new base weights."""
        self._present, self._loaded = "", []

    async def close(self, client: ServerClient) -> None:
        """Unload all adapters, since a joined server continues without us, and remove the files."""
        with contextlib.suppress(PenstockError):
            for name in self._loaded:
                await client.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=5.0)
        self._loaded = []
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _unload_unused(self, client: ServerClient) -> None:
        counts = Counter(self._users.values())
        for name in [each for each in self._loaded[:-1] if not counts[each]]:
            await client.post("/v1/unload_lora_adapter", {"lora_name": name})
            self._loaded.remove(name)
            shutil.rmtree(self._at(int(name.rpartition("@")[2])), ignore_errors=True)

    def _at(self, version: int) -> Path:
        return self._folder / f"version{version}"

    def _write(self, update: WeightUpdate, spec: AdapterSpec) -> None:
        import torch
        from safetensors.torch import save_file

        if spec.dora:
            raise PenstockError("vLLM serves no DoRA adapters; use engine.kind=embedded")
        staged = self._receiver.stage(update)
        tensors = {
            each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for each in update.tensors
        }
        try:
            self._receiver.load(staged, tensors)()
        finally:
            self._receiver.drop(staged)
        folder = self._at(update.version)
        folder.mkdir(exist_ok=True)
        save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, str(folder / TENSORS))
        (folder / CONFIG).write_text(json.dumps(_peft_config(spec, tensors, self._model)))


def _peft_config(spec: AdapterSpec, tensors: dict[str, Any], model: str) -> dict[str, Any]:
    layers = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.rslora,
        "use_dora": False,
        "bias": "none",
        "target_modules": layers,
    }
