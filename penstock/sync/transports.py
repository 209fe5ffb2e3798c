"""Transports by name: the trainer's side is chosen in the config, the engine's by what an update says."""

from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.interfaces import Staged, Verification
from penstock.sync import cuda_ipc, shared_memory
from penstock.types import WeightUpdate

Publisher = shared_memory.SharedMemoryPublisher | cuda_ipc.CudaIpcPublisher
Receiver = shared_memory.SharedMemoryReceiver | cuda_ipc.CudaIpcReceiver
RECEIVERS: dict[str, type[Receiver]] = {
    shared_memory.TRANSPORT: shared_memory.SharedMemoryReceiver,
    cuda_ipc.TRANSPORT: cuda_ipc.CudaIpcReceiver,
}


def make_publisher(
    transport: str,
    parameters: Mapping[str, torch.Tensor],
    *,
    folder: Path,
    slots: int,
    dtype: torch.dtype | None = None,
) -> Publisher:
    """`folder` is where shared-memory buckets are put; CUDA IPC needs none."""
    if transport == cuda_ipc.TRANSPORT:
        return cuda_ipc.CudaIpcPublisher(parameters, slots=slots, dtype=dtype)
    if transport == shared_memory.TRANSPORT:
        return shared_memory.SharedMemoryPublisher(parameters, folder=folder, slots=slots, dtype=dtype)
    raise ValueError(f"sync.transport must be one of {', '.join(RECEIVERS)}, got {transport!r}")


class AnyReceiver:
    """`interfaces.WeightReceiver` for whatever transport an update came by."""

    def __init__(self) -> None:
        self._receivers: dict[str, Receiver] = {}

    def stages(self, update: WeightUpdate) -> bool:
        return self._receiver(update).stages(update)

    def stage(self, update: WeightUpdate) -> Staged:
        return self._receiver(update).stage(update)

    def is_prepared(self, staged: Staged) -> bool:
        return self._receiver(staged.update).is_prepared(staged)

    def load(self, staged: Staged, tensors: Mapping[str, torch.Tensor]) -> Verification:
        return self._receiver(staged.update).load(staged, tensors)

    def drop(self, staged: Staged) -> None:
        self._receiver(staged.update).drop(staged)

    def _receiver(self, update: WeightUpdate) -> Receiver:
        if update.transport not in RECEIVERS:
            raise ValueError(f"transport must be one of {', '.join(RECEIVERS)}, got {update.transport!r}")
        if update.transport not in self._receivers:
            self._receivers[update.transport] = RECEIVERS[update.transport]()
        return self._receivers[update.transport]

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
