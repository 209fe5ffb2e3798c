"""The `sync` section: how new weights reach the engines."""

from pydantic import Field, field_validator

from penstock.config import Section
from penstock.sync.transports import check_for_run
from penstock.types import Interrupt


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: str = "shared_memory"
    """How buckets travel from trainer to engines: `shared_memory` on one machine, `cuda_ipc` on one GPU."""
    interrupt: Interrupt = "inflight"
    """What happens to a generation in flight when weights arrive: `inflight` swaps between two forward
    passes and keeps its KV, `inflight_recompute` also rebuilds the KV under the new weights. The others need an
    engine that says it can: `drain` finishes answers first, `abort_resume` goes on from their prefixes,
    `abort_retry` starts them again."""
    slots: int = Field(default=2, ge=1)
    """Snapshots that may exist at once; the trainer waits for a free one only when engines lag this far."""

    @field_validator("transport")
    @classmethod
    def _can_be_used_by_a_run(cls, name: str) -> str:
        check_for_run(name)
        return name
