"""The sender's side of vLLM's own transfer engines `nccl` and `ipc`, for servers on GPUs. Not run on a GPU yet.

nccl    rank 0 of a group with the server's workers: broadcasts packed chunks, while /update_weights receives them
ipc     one buffer on the GPU that the worker computes on: each /update_weights reads one chunk out of it
"""

import asyncio
import base64
import pickle
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from penstock.engines.vllm.native_packing import Chunk, described, ipc_chunks, nccl_chunks
from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import UserError

CHUNK_BYTES = 256 << 20
NUM_BUFFERS = 2
"""Chunks that a server receives at once."""


class Sender(Protocol):
    """Brings tensors into a server that has begun an update."""

    async def open(self, client: ServerClient) -> None:
        """Meet the server's workers."""

    async def send(self, client: ServerClient, tensors: Chunk) -> None:
        """All of them, until the server has loaded them."""


class Group(Protocol):
    """Rank 0 of the group with a server's workers. Both calls wait."""

    def meet(self, world_size: int, unique_id: bytes) -> None: ...

    def broadcast(self, packed: torch.Tensor) -> None: ...


class NcclGroup:
    """By torch's own NCCL calls: a process group of torch.distributed can't be met from outside."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._group: Any = None

    @staticmethod
    def unique_id() -> bytes:
        return bytes(torch.cuda.nccl.unique_id())  # type: ignore[no-untyped-call]

    def meet(self, world_size: int, unique_id: bytes) -> None:
        with torch.cuda.device(self._device):
            self._group = torch.cuda.nccl.init_rank(world_size, unique_id, 0)  # type: ignore[no-untyped-call]
            # vLLM's workers add up one element as soon as they are in the group, and wait for everybody's.
            one = torch.zeros(1, device=self._device)
            torch.cuda.nccl.all_reduce([one], comms=[self._group])  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)

    def broadcast(self, packed: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.nccl.broadcast([packed], root=0, comms=[self._group])
            torch.cuda.synchronize(self._device)


class NcclSender:
    """`group` is made for one server."""

    def __init__(self, group: Group, unique_id: bytes, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._group = group
        self._unique_id = unique_id
        self._chunk_bytes = chunk_bytes

    async def open(self, client: ServerClient) -> None:
        world_size = 1 + int((await client.get("/get_world_size"))["world_size"])
        init = {
            "rank_offset": 1,
            "world_size": world_size,
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(),
            "packed": True,
            "packed_buffer_size_bytes": self._chunk_bytes,
            "packed_num_buffers": NUM_BUFFERS,
        }
        # Both sides wait for each other in there.
        async with asyncio.TaskGroup() as meeting:
            meeting.create_task(client.post("/init_weight_transfer_engine", {"init_info": init}))
            meeting.create_task(asyncio.to_thread(self._group.meet, world_size, self._unique_id))

    async def send(self, client: ServerClient, tensors: Chunk) -> None:
        async with asyncio.TaskGroup() as sending:
            sending.create_task(client.post("/update_weights", {"update_info": described(tensors)}))
            sending.create_task(asyncio.to_thread(self._broadcast, tensors))

    def _broadcast(self, tensors: Chunk) -> None:
        for chunk in nccl_chunks(tensors, self._chunk_bytes):
            self._group.broadcast(torch.cat([as_bytes(tensor) for _, tensor in chunk]))


class IpcSender:
    """`device` is the GPU that the server's one worker computes on."""

    def __init__(self, device: str, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes

    async def open(self, client: ServerClient) -> None:
        await client.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})

    async def send(self, client: ServerClient, tensors: Chunk) -> None:
        largest = max((tensor.nbytes for _, tensor in tensors), default=0)
        buffer = torch.empty(max(self._chunk_bytes, largest), dtype=torch.uint8, device=self._device)
        handle = self._handle(buffer)
        for update_info in self._updates(tensors, buffer, handle):
            await client.post("/update_weights", {"update_info": update_info})

    def _handle(self, buffer: torch.Tensor) -> str:
        """What vLLM unpickles: how to open the buffer, by the GPU that it lies on."""
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
        return base64.b64encode(pickle.dumps({uuid: arguments})).decode()

    def _updates(self, tensors: Chunk, buffer: torch.Tensor, handle: str) -> Iterator[dict[str, Any]]:
        """One a chunk. The server has read the last one when the next is written."""
        for chunk in ipc_chunks(tensors, buffer.nbytes):
            packed = torch.cat([as_bytes(tensor) for _, tensor in chunk])
            buffer[: packed.nbytes].copy_(packed)
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)
            yield {
                **described(chunk),
                "tensor_sizes": [tensor.nbytes for _, tensor in chunk],
                "ipc_handles_pickled": handle,
            }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def make_sender(transfer: str, device: str) -> Sender:
    """For `engine.vllm.transfer`: nccl or ipc."""
    if not device.startswith("cuda"):
        raise UserError(
            f"engine.vllm.transfer={transfer} needs a GPU, and the engine's device is {device}; set "
            "engine.vllm.transfer=penstock"
        )
    if transfer == "ipc":
        return IpcSender(device)
    return NcclSender(NcclGroup(device), NcclGroup.unique_id())
