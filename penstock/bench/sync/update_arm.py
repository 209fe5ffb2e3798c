"""One arm of `penstock bench sync`: what is sent, how it travels, and what becomes of sequences in flight."""

from typing import Literal

import msgspec

from penstock.records import Interrupt, UpdateSelection
from penstock.sync.transports import transport_of


class UpdateArm(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at work takes one update after another in this way."""

    transport: str
    selection: UpdateSelection = "full"
    interrupt: Interrupt = "inflight"
    drained: bool = False
    """A baseline: no answer begins until all others have ended, and only then the update is taken."""
    resume_kv: Literal["keep", "recompute"] = "keep"
    """Of `abort_resume`: whether keys and values of the prefixes stay or are computed again."""
    rank: int = 16
    """Of an adapter."""
    layers: tuple[str, ...] = ()
    """Of an adapter: how the names of its layers end. Empty: all linear ones."""
    batch: int = 8
    """Sequences that the engine decodes."""
    busy: bool = False
    """Whether the trainer keeps the GPU busy meanwhile."""
    how: str = ""
    """How two processes share the GPU."""
    at_most: int = 100
    """Updates, where each takes long."""

    @property
    def needs_one_process(self) -> bool:
        """Whether trainer and engine must be one process for its transport."""
        return not transport_of(self.transport).between_processes

    @property
    def name(self) -> str:
        """As the report calls it."""
        parts = [self.transport.replace("_", " "), self.selection]
        if self.selection == "adapter":
            parts[-1] = f"adapter of rank {self.rank}" + (" on attention" if self.layers else "")
        if self.interrupt != "inflight":
            parts.append(self.interrupt + (" without KV" if self.resume_kv == "recompute" else ""))
        if self.drained:
            parts.append("blocked until drained")
        if self.how:
            parts += [f"batch {self.batch}", self.how]
        if self.busy:
            parts.append("trainer busy")
        return ", ".join(parts)


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured, of which model."""

    shape: str
    device: str
    updates: int
    """In each arm, of which the medians are."""
    warmup: int = 3
    """Updates before them, which open buckets and warm caches."""
    rate_s: float = 1.0
    """For so long tokens are counted while nothing is updated."""

    def num_updates(self, arm: UpdateArm) -> int:
        """With those before."""
        return self.warmup + min(self.updates, arm.at_most)
