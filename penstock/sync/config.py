"""The `sync` section: how new weights reach the engines."""

from typing import Literal

from penstock.config import Section
from penstock.types import Interrupt


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["shared_memory", "cuda_ipc"] = "shared_memory"
    """How buckets travel from trainer to engines; `cuda_ipc` needs both on the same GPU."""
    interrupt: Interrupt = "inflight"
    """What happens to a generation in flight when weights arrive: `inflight` swaps between two forward
    passes and keeps its KV, `inflight_recompute` also rebuilds the KV under the new weights. The others need an
    engine that says it can: `drain` finishes answers first, `abort_resume` goes on from their prefixes,
    `abort_retry` starts them again."""
    slots: int = 2
    """Snapshots that may exist at once; the trainer waits for a free one only when engines lag this far."""
