"""The `sync` section: how new weights reach the engines."""

from typing import Literal

from penstock.config import Section


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["shared_memory", "cuda_ipc"] = "shared_memory"
    """How buckets travel from trainer to engines; `cuda_ipc` needs both on the same GPU."""
    interrupt: Literal["inflight", "inflight_recompute"] = "inflight"
    """What happens to a generation in flight when weights arrive: `inflight` swaps between two forward
    passes and keeps its KV, `inflight_recompute` also rebuilds the KV under the new weights."""
    slots: int = 2
    """Snapshots that may exist at once; the trainer waits for a free one only when engines lag this far."""
