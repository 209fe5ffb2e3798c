"""The publisher that the `sync` section asks for."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.interfaces import WeightPublisher
from penstock.sync.config import SyncConfig
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher


def open_publisher(
    section: SyncConfig,
    tensors: Mapping[str, torch.Tensor],
    at: Rendezvous,
    *,
    transport: str = "",
    **options: Any,
) -> WeightPublisher:
    """`transport` overrides the section's; `options` are fields of `Publishing`, and override it too."""
    settings = {
        "slots": section.slots,
        "bucket_bytes": section.bucket_mb << 20,
        "selection": section.selection,
        "anchor_every": section.anchor_every,
    }
    return make_publisher(transport or section.transport, tensors, Publishing(**{**settings, **options}), at)
