"""Run by vLLM's own Python: what we send to its own transfer engines, read by vLLM's classes. Prints JSON."""

import base64
import json
import os
import pickle
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
LIMITS = (1, 64, 100, 160, 1000)
SIZES = (40, 40, 16, 100, 8, 8)


class Recorder:
    """A client that keeps what is posted."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, Any]] = []

    async def get(self, path: str) -> Any:
        return {"world_size": 2}

    async def post(self, path: str, body: Any = None) -> Any:
        self.bodies.append((path, body))


class Group:
    def meet(self, world_size: int, unique_id: bytes) -> None:
        pass

    def broadcast(self, packed: Any) -> None:
        pass


def main() -> None:
    import asyncio

    import torch
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferInitInfo,
        IPCWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    from penstock.engines.vllm.native_packing import nccl_chunks
    from penstock.engines.vllm.native_senders import IpcSender, NcclSender, as_bytes

    tensors = [(str(number), torch.arange(size // 4) + number) for number, size in enumerate(SIZES)]
    for limit in LIMITS:
        stream = iter(tensors)
        for chunk in nccl_chunks(tensors, limit):
            theirs = pack_tensors(stream, lambda item: item[1], limit)
            assert theirs is not None
            assert theirs.names == [name for name, _ in chunk]
            assert torch.equal(theirs.packed_tensor, torch.cat([as_bytes(tensor) for _, tensor in chunk]))
        assert pack_tensors(stream, lambda item: item[1], limit) is None

    async def exchange() -> list[tuple[str, Any]]:
        recorder: Any = Recorder()
        nccl, ipc = NcclSender(Group(), bytes(128)), Described("cpu", chunk_bytes=100)
        for sender in (nccl, ipc):
            await sender.open(recorder)
            await sender.send(recorder, tensors)
        bodies: list[tuple[str, Any]] = recorder.bodies
        return bodies

    class Described(IpcSender):
        def _handle(self, buffer: torch.Tensor) -> str:
            return base64.b64encode(pickle.dumps({"GPU": ("arguments",)})).decode()

    (_, nccl_init), (_, nccl_update), (_, ipc_init), *ipc_updates = asyncio.run(exchange())
    init = NCCLWeightTransferInitInfo(**nccl_init["init_info"])
    update = NCCLWeightTransferUpdateInfo(**nccl_update["update_info"])
    handles = [IPCWeightTransferUpdateInfo(**body["update_info"]).ipc_handles for _, body in ipc_updates]
    found = {
        "world_size": init.world_size,
        "id_bytes": len(init.nccl_unique_id_bytes or b""),
        "packed": [init.packed, IPCWeightTransferInitInfo(**ipc_init["init_info"]).packed],
        "names": update.names,
        "handles": handles,
    }
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
