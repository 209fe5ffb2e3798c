"""Defines an arm of `penstock bench sync`: what is sent, how it travels, and what happens to running sequences."""

from typing import Literal

import msgspec

from penstock.records import Interrupt, UpdateSelection
from penstock.sync.transports import transport_of


class UpdateArm(msgspec.Struct, frozen=True, kw_only=True):
    """Describes how a working engine takes one update after another."""

    transport: str
    selection: UpdateSelection = "full"
    interrupt: Interrupt = "inflight"
    drained: bool = False
    """A baseline: no answer begins until all others have ended, and only then is the update taken."""
    resume_kv: Literal["keep", "recompute"] = "keep"
    """For `abort_resume`: whether keys and values of the prefixes are kept or recomputed."""
    rank: int = 16
    """Rank of an adapter."""
    layers: tuple[str, ...] = ()
    """The ends of the names of an adapter's layers. Empty: all linear ones."""
    batch: int = 8
    """Sequences that the engine decodes."""
    busy: bool = False
    """Whether the trainer keeps the GPU busy meanwhile."""
    how: str = ""
    """How two processes share the GPU."""
    at_most: int = 100
    """Most updates, for arms whose updates take long."""

    @property
    def needs_one_process(self) -> bool:
        """Return whether the transport needs trainer and engine in one process."""
        return not transport_of(self.transport).between_processes

    @property
    def name(self) -> str:
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
    """Sets how much is measured, and of which model."""

    shape: str
    device: str
    updates: int
    """Updates in each arm, of which the median is taken."""
    warmup: int = 3
    """Updates before those, which open buckets and warm caches."""
    rate_s: float = 1.0
    """How long tokens are counted without updates."""

    def num_updates(self, arm: UpdateArm) -> int:
        """Return the number of updates, warm-up included."""
        return self.warmup + min(self.updates, arm.at_most)
