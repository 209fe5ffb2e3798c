"""Defines the `sync` section: how new weights reach the engines."""

from typing import Literal

from pydantic import Field, field_validator

from penstock.config import Section
from penstock.records import Interrupt
from penstock.sync.transports import check_for_run


class SyncConfig(Section):
    """Configures how new weights reach the engines."""

    transport: str = "auto"
    """How buckets travel from trainer to engines: `shared_memory` on one machine, `cuda_ipc` on one GPU,
    `collective` by broadcast to all engines at once (gloo, or NCCL where each has a GPU of its own),
    `filesystem` through files of `sync.folder`, `http` from a server in the trainer, or a transport of your
    own by path (`file.py:NAME`, `module:NAME`). `auto` takes the fastest of the first two that the run's
    devices allow. Over several machines (`launcher`) it takes `filesystem` if `folder` is set, `collective`
    if `interface` is set, otherwise `http`."""
    folder: str = ""
    """For `filesystem`: a folder that trainer and engines see under the same path, on a shared disk or a mounted
    object store. Empty: `weights` in the run folder if workers may run on other machines, otherwise a private
    folder."""
    interface: str = ""
    """For `http` and `collective`: the network interface (`eth0`) on which trainer and engines meet; nothing
    listens on any other. Empty: the loopback. Broadcasts check no token: use them on a trusted network."""
    selection: Literal["full", "delta"] = "full"
    """What is sent. `full` sends all weights each time. `delta` sends, without loss, only the values whose bits
    have changed since the last version that every engine has. Deltas are small (a few percent at the learning
    rates of post-training) and cost the trainer one more copy of the weights; they pay off where the network
    or the disk is slow."""
    anchor_every: int = Field(default=20, ge=1)
    """With `delta`, one in this many versions is sent in full. An engine that joins or has lost its weights gets
    a full one at any time."""
    dtype: Literal["engine", "float32", "bfloat16", "float16"] = "engine"
    """The number format in which weights travel: `engine` is that of the engines; any other must hold it without
    loss."""
    bucket_mb: int = Field(default=0, ge=0, le=65536)
    """Megabytes that travel as one piece. Tensors are packed together up to this size, and larger ones are
    split. 0 takes what suits the transport."""
    interrupt: Interrupt = "inflight"
    """What happens to running generations when weights arrive. `inflight` swaps the weights between two forward
    passes and keeps the KV; `inflight_recompute` also recomputes the KV with the new weights; `drain` lets
    answers end first while new requests wait; `abort_resume` ends answers and continues them from their
    prefixes; `abort_retry` discards them and starts over. An engine that lacks one refuses it at the start.
    """
    load_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the engines that load new weights at once and stand still meanwhile. It is rounded up, but never
    all of several engines load at once, so that the others generate."""
    slots: int = Field(default=2, ge=1, le=64)
    """Snapshots that may exist at once. With 2 or more the trainer never waits for engines: one is being sent,
    and a newer snapshot replaces one that has not been sent."""
    every: int = Field(default=1, ge=1)
    """Publish the weights of every n-th step, and of the last one. At most `staleness.max_staleness` + 1."""
    retries: int = Field(default=3, ge=0)
    """How often a failed transfer is retried. After that, the engines that failed leave the run and others
    continue their requests; without any other engine, the run ends."""
    retry_s: float = Field(default=1.0, gt=0)
    """Seconds before the first retry. The wait doubles with each further one."""

    @field_validator("transport")
    @classmethod
    def _can_be_used_by_a_run(cls, name: str) -> str:
        if name != "auto":
            check_for_run(name)
        return name

    @property
    def num_snapshots(self) -> int:
        """Return how many snapshots the trainer keeps, with the one that deltas are taken against."""
        return self.slots + (self.selection == "delta")

    def wire_dtype(self, engine: str) -> str:
        """Return the dtype in which weights travel to engines of this dtype."""
        return engine if self.dtype == "engine" else self.dtype
