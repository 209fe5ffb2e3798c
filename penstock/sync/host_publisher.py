"""The trainer's side of transports whose snapshots lie in the host's memory."""

from collections.abc import Mapping

import torch

from penstock.sync.slot_publisher import Publishing, SlotPublisher


class HostPublisher(SlotPublisher):
    """Weights of a GPU are hashed there, as part of the snapshot: on the host that takes seconds."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], publishing: Publishing, *, bucket_bytes: int
    ) -> None:
        self._hashed: dict[int, dict[str, int]] = {}
        self._on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        super().__init__(tensors, publishing, bucket_bytes=bucket_bytes)

    def _make_bucket(self, slot: int, number: int, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu)

    def _names(self, slot: int) -> tuple[str, ...]:
        """No engine sees a slot: what it is to read is offered."""
        return ()

    def _fill(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super()._fill(slot, tensors)
        if self._on_gpu:
            as_sent = [
                source.to(getattr(torch, spec.dtype))
                for spec, source in zip(self._specs, self._parts(tensors), strict=True)
            ]
            self._hashed[slot] = self._fingerprints.start(self._shards(as_sent))()
            torch.cuda.synchronize()

    def _fingerprint(self, slot: int) -> dict[str, int]:
        return self._hashed[slot] if self._on_gpu else super()._fingerprint(slot)
