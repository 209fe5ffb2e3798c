"""vLLM's own transfer engines, against a server that reassembles what it is sent as vLLM's workers do."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engines.vllm.native_senders import IpcSender, NcclSender, Sender, make_sender
from penstock.engines.vllm.native_transfer import NativeCalls
from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.weight_calls import HalfLoaded
from penstock.errors import UserError
from penstock.sync.shared_memory import SharedMemoryPublisher
from penstock.sync.transports import AnyReceiver
from tests.engines.vllm.fake_server import FakeVllm

UNIQUE_ID = bytes(range(128))


def published() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (10, 4), "layers.0.mlp.experts.gate_up_proj": (2, 6, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def expected() -> dict[str, torch.Tensor]:
    """Under the names of a checkpoint: experts one by one."""
    tensors = published()
    joined = tensors.pop("layers.0.mlp.experts.gate_up_proj")
    for number in range(2):
        tensors[f"layers.0.mlp.experts.{number}.gate_proj.weight"] = joined[number, :3]
        tensors[f"layers.0.mlp.experts.{number}.up_proj.weight"] = joined[number, 3:]
    return tensors


class FakeWorkers(FakeVllm):
    """Takes chunks off `wire` or out of `buffer`, by what the updates say of them."""

    def __init__(self) -> None:
        super().__init__()
        self.init: dict[str, Any] = {}
        self.wire: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        self.buffer = torch.zeros(0)
        self.loaded: dict[str, torch.Tensor] = {}

    async def _do_get_world_size(self, request: Any, body: Any) -> Any:
        return {"world_size": 2}

    async def _do_init_weight_transfer_engine(self, request: Any, body: Any) -> Any:
        self.init = body["init_info"]
        return {}

    async def _do_update_weights(self, request: Any, body: Any) -> Any:
        info = body["update_info"]
        rows = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        if "ipc_handles_pickled" in info:
            assert info["ipc_handles_pickled"] == "how to open it"
            assert sum(info["tensor_sizes"]) <= self.buffer.nbytes
            self._unpack(self.buffer[: sum(info["tensor_sizes"])], rows)
            return {}
        chunk: list[Any] = []
        size = 0
        for row in rows:
            chunk.append(row)
            size += 4 * torch.Size(row[2]).numel()
            if size > self.init["packed_buffer_size_bytes"] or row is rows[-1]:
                packed = await self.wire.get()
                assert packed.nbytes == size
                self._unpack(packed, chunk)
                chunk, size = [], 0
        return {}

    def _unpack(self, packed: torch.Tensor, rows: list[Any]) -> None:
        sizes = [4 * torch.Size(shape).numel() for _, _, shape in rows]
        for (name, dtype, shape), part in zip(rows, packed.split(sizes), strict=True):
            self.loaded[name] = part.clone().view(getattr(torch, dtype)).view(shape)


class Wire:
    """Rank 0 of a group whose other ranks are a `FakeWorkers`."""

    def __init__(self, fake: FakeWorkers, loop: asyncio.AbstractEventLoop) -> None:
        self._fake = fake
        self._loop = loop
        self.met: tuple[int, bytes] | None = None

    def meet(self, world_size: int, unique_id: bytes) -> None:
        self.met = (world_size, unique_id)

    def broadcast(self, packed: torch.Tensor) -> None:
        self._loop.call_soon_threadsafe(self._fake.wire.put_nowait, packed)


class OnCpu(IpcSender):
    """Its buffer lies where the fake sees it."""

    def __init__(self, fake: FakeWorkers, chunk_bytes: int) -> None:
        super().__init__("cpu", chunk_bytes=chunk_bytes)
        self._fake = fake

    def _handle(self, buffer: torch.Tensor) -> str:
        self._fake.buffer = buffer
        return "how to open it"


async def bring(fake: FakeWorkers, sender: Sender, folder: Path) -> None:
    tensors = published()
    publisher = SharedMemoryPublisher(tensors, folder=folder)
    publisher.snapshot(4, tensors)
    update = publisher.describe(4)
    try:
        async with fake.served(folder / "s") as url, ServerClient("engine0", url) as client:
            calls = NativeCalls(client, sender, AnyReceiver(), device="cpu")
            await calls.open(3)
            assert fake.version == "3"
            await calls.stage(update)
            loaded = await calls.load(update)
            assert loaded.unverified == tuple(tensors)
    finally:
        publisher.close()


def check_loaded(fake: FakeWorkers) -> None:
    assert fake.version == "4"
    assert sorted(fake.loaded) == sorted(expected())
    for name, tensor in expected().items():
        assert torch.equal(fake.loaded[name], tensor)
    assert [call for call in fake.calls if "update" in call][1:] == [
        "/start_weight_update",
        *(call for call in fake.calls if call == "/update_weights"),
        "/finish_weight_update",
    ]


@pytest.mark.parametrize("chunk_bytes", [64, 200, 10_000])
def test_nccl_broadcasts_chunks_that_the_server_cuts_alike(tmp_path: Path, chunk_bytes: int) -> None:
    async def main() -> None:
        fake = FakeWorkers()
        wire = Wire(fake, asyncio.get_running_loop())
        await bring(fake, NcclSender(wire, UNIQUE_ID, chunk_bytes=chunk_bytes), tmp_path)
        assert wire.met == (3, UNIQUE_ID)
        assert fake.init == {
            "rank_offset": 1,
            "world_size": 3,
            "nccl_unique_id_b64": base64.b64encode(UNIQUE_ID).decode(),
            "packed": True,
            "packed_buffer_size_bytes": chunk_bytes,
            "packed_num_buffers": 2,
        }
        check_loaded(fake)

    asyncio.run(main())


@pytest.mark.parametrize(("chunk_bytes", "num_calls"), [(64, 3), (200, 3), (10_000, 1)])
def test_ipc_fills_one_buffer_a_call(tmp_path: Path, chunk_bytes: int, num_calls: int) -> None:
    async def main() -> None:
        fake = FakeWorkers()
        await bring(fake, OnCpu(fake, chunk_bytes), tmp_path)
        assert fake.init == {"packed": True}
        assert fake.calls.count("/update_weights") == num_calls
        check_loaded(fake)

    asyncio.run(main())


def test_what_fails_after_the_start_leaves_a_server_half_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeWorkers()
        fake.broken = {"/update_weights"}
        with pytest.raises(HalfLoaded, match="version 4 was not loaded whole: .*boom"):
            await bring(fake, OnCpu(fake, 64), tmp_path)

    asyncio.run(main())


@pytest.mark.parametrize("transfer", ["nccl", "ipc"])
def test_a_cpu_is_refused(transfer: str) -> None:
    with pytest.raises(UserError, match=f"engine.vllm.transfer={transfer} needs a GPU, and .* is cpu; set"):
        make_sender(transfer, "cpu")
