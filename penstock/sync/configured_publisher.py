"""The publisher that the `sync` section asks for."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.interfaces import WeightPublisher
from penstock.sync.config import SyncConfig
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher


def open_publisher(
    section: SyncConfig, tensors: Mapping[str, torch.Tensor], at: Rendezvous, **options: Any
) -> WeightPublisher:
    """`options` are fields of `Publishing`, and override the section."""
    settings = {
        "slots": section.slots,
        "bucket_bytes": section.bucket_mb << 20,
        "selection": section.selection,
        "anchor_every": section.anchor_every,
        "replaces": True,
    }
    return make_publisher(section.transport, tensors, Publishing(**{**settings, **options}), at)
