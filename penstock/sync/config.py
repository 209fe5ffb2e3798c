"""The `sync` section: how new weights reach the engines."""

from typing import Literal

from pydantic import Field, field_validator

from penstock.config import Section
from penstock.records import Interrupt
from penstock.sync.transports import check_for_run


class SyncConfig(Section):
    """How new weights reach the engines."""

    transport: str = "auto"
    """How buckets travel from trainer to engines: `shared_memory` on one machine, `cuda_ipc` on one GPU,
    `collective` by broadcast to all engines at once (gloo, or NCCL where each has a GPU of its own), `filesystem`
    through files of `sync.folder`, `http` from a server of the trainer, or a transport of your own by path
    (`file.py:NAME`, `module:NAME`). `auto`: the fastest of the first two that
    the run's devices allow. Over several machines (`launcher`) `filesystem` where `folder` is named, `collective`
    where `interface` is, otherwise `http`."""
    folder: str = ""
    """Of `filesystem`: a folder that trainer and engines see under the same path, on a shared disk or a mounted
    object store. Empty: `weights` in the run folder where workers may be elsewhere, otherwise a private folder."""
    interface: str = ""
    """Of `http` and `collective`: the network interface (`eth0`) on which trainer and engines meet; nothing listens
    elsewhere. Empty: the loopback. Broadcasts know no token: use them on a trusted network."""
    selection: Literal["full", "delta"] = "full"
    """What is sent: `full`: all weights, each time. `delta`: only the values whose bits have changed since the last
    version that every engine has, without loss. Deltas are small (a few percent at the learning rates of
    post-training) and take the trainer one more copy of the weights; they pay off where the network or the disk is
    slow."""
    anchor_every: int = Field(default=20, ge=1)
    """Under `delta`, one in so many versions is sent in full. An engine that joins or has lost its weights gets a
    full one at any time."""
    dtype: Literal["engine", "float32", "bfloat16", "float16"] = "engine"
    """The number format in which weights travel: that of the engines, or one that theirs holds without loss."""
    bucket_mb: int = Field(default=0, ge=0)
    """Megabytes that travel as one piece. Tensors are packed together up to this, and larger ones are split. 0
    takes what suits the transport."""
    interrupt: Interrupt = "inflight"
    """What happens to a generation in flight when weights arrive: `inflight` swaps between two forward
    passes and keeps its KV, `inflight_recompute` also rebuilds the KV under the new weights, `drain` lets answers
    end first while new ones wait, `abort_resume` takes them out of the batch and goes on from their prefixes,
    `abort_retry` throws them away and starts them again. An engine that lacks one says so at the start."""
    slots: int = Field(default=2, ge=1)
    """Snapshots that may exist at once. With 2 or more the trainer never waits for engines: one is being sent, and
    a newer one takes the place of one that waits."""
    every: int = Field(default=1, ge=1)
    """Publish the weights of every n-th step, and of the last one. At most `staleness.max_staleness` + 1."""
    retries: int = Field(default=3, ge=0)
    """How often a transfer that failed is tried again. Then the engines that failed leave the run, and others go
    on with their requests; without any other engine, the run ends."""
    retry_s: float = Field(default=1.0, gt=0)
    """Seconds before the first retry; each of the next waits twice as long."""

    @field_validator("transport")
    @classmethod
    def _can_be_used_by_a_run(cls, name: str) -> str:
        if name != "auto":
            check_for_run(name)
        return name

    @property
    def num_snapshots(self) -> int:
        """With the one that deltas are taken against."""
        return self.slots + (self.selection == "delta")

    def wire_dtype(self, engine: str) -> str:
        """In which weights travel to engines of this number format."""
        return engine if self.dtype == "engine" else self.dtype
