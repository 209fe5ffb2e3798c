"""Opens the trainer's publisher as the `sync` section says; a run that trains an adapter has two in one.

Such a run sends the weights below the adapter once, then the adapter alone:

    version b      full      the base weights; when every engine has them, their buckets are freed
    version b+1 …  adapter   small, complete in itself, and on top of b
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.records import WeightUpdate
from penstock.records.interfaces import WeightPublisher
from penstock.sync.config import SyncConfig
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher


def open_publisher(
    section: SyncConfig, tensors: Mapping[str, torch.Tensor], at: Rendezvous, **options: Any
) -> WeightPublisher:
    """Open a publisher for a section. `options` are fields of `Publishing` that override the section."""
    settings = {
        "slots": section.slots,
        "bucket_bytes": section.bucket_mb << 20,
        "selection": section.selection,
        "anchor_every": section.anchor_every,
        "replaces": True,
    }
    return make_publisher(section.transport, tensors, Publishing(**{**settings, **options}), at)


class AdapterPublisher:
    """Combines the publishers of base weights and adapter, chosen by the version. Each may use any transport."""

    def __init__(
        self, open_base: Callable[[], WeightPublisher], adapter: WeightPublisher, *, base_version: int
    ) -> None:
        """`open_base` is called again for an engine that joins later, since the buckets are freed in between."""
        self._open_base = open_base
        self._base: WeightPublisher | None = open_base()
        self._adapter = adapter
        self._base_version = base_version

    def snapshot(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Take a snapshot of the base weights for their version, and of the adapter for every other."""
        if version == self._base_version and self._base is None:
            self._base = self._open_base()
        self._of(version).snapshot(version, tensors)

    def describe(self, version: int, *, full: bool = False) -> WeightUpdate:
        return self._of(version).describe(version, full=full)

    def send(self, version: int) -> None:
        self._of(version).send(version)

    def cancel(self) -> None:
        if self._base is not None:
            self._base.cancel()
        self._adapter.cancel()

    def release(self, version: int, *, delivered: bool = True) -> None:
        self._of(version).release(version, delivered=delivered)
        if version == self._base_version:
            self._close_base()

    def close(self) -> None:
        self._close_base()
        self._adapter.close()

    def _close_base(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def _of(self, version: int) -> WeightPublisher:
        if version != self._base_version:
            return self._adapter
        if self._base is None:
            raise ValueError(f"version {version} has no snapshot: it was released, or never taken")
        return self._base
