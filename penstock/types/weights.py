"""Published weights, and what an engine says when it has taken them."""

import msgspec

from penstock.types.base import DEFAULT_POLICY, Record


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's place in a publication: its global shape, its dtype and its bytes in one bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    num_bytes: int


class WeightUpdate(Record, frozen=True, kw_only=True):
    """A published version, ready to be taken: what to read, where, and what it must add up to."""

    policy: str = DEFAULT_POLICY
    version: int
    transport: str
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[str, ...]
    """Names by which the transport finds each bucket (a shared-memory name, a file, …)."""
    fingerprint: dict[str, int]
    """One hash per tensor name, of the values as an engine must hold them."""
    recompute_kv: bool = False


class UpdateReceipt(Record, frozen=True, kw_only=True):
    """What an engine says after an update: verified, and what it cost."""

    policy: str
    version: int
    stall_s: float
    """How long no forward pass could run because of this update; on a GPU, by the device's own clock."""
    verify_s: float
    """How long the fingerprint took after the copies. On a GPU the next passes may have begun by then."""
