"""How another process finds device memory: what torch needs to open it, as text."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """How another process finds a bucket: what torch needs to open shared device memory, as text."""

    size: int
    offset: int
    counter_offset: int
    waits: bool
    memory: bytes
    counter: bytes
    event: bytes

    @classmethod
    def of(cls, bucket: torch.Tensor) -> "Handle":
        storage: Any = bucket.untyped_storage()
        _, memory, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
        return cls(
            size=size,
            offset=offset,
            counter_offset=counter_offset,
            waits=waits,
            memory=memory,
            counter=counter,
            event=event,
        )

    def encode(self) -> str:
        numbers = f"{self.size}:{self.offset}:{self.counter_offset}:{int(self.waits)}"
        return ":".join([numbers, self.memory.hex(), self.counter.hex(), self.event.hex()])

    @classmethod
    def decode(cls, text: str) -> "Handle":
        size, offset, counter_offset, waits, memory, counter, event = text.split(":")
        return cls(
            size=int(size),
            offset=int(offset),
            counter_offset=int(counter_offset),
            waits=waits == "1",
            memory=bytes.fromhex(memory),
            counter=bytes.fromhex(counter),
            event=bytes.fromhex(event),
        )

    def open(self, device: torch.device) -> torch.Tensor:
        """The bucket's bytes, in this process."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage_class: Any = torch.UntypedStorage
        storage = storage_class._new_shared_cuda(
            torch.cuda.current_device() if device.index is None else device.index,
            self.memory,
            self.size,
            self.offset,
            self.counter,
            self.counter_offset,
            self.event,
            self.waits,
        )
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
