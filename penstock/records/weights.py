"""Defines published weights, and what an engine reports when it has taken them."""

from typing import Literal

import msgspec

from penstock.records.base import DEFAULT_POLICY, Record

Interrupt = Literal["inflight", "inflight_recompute", "drain", "abort_resume", "abort_retry"]
"""What happens to sequences in flight when new weights arrive."""
ONE_VERSION: tuple[Interrupt, ...] = ("drain", "abort_retry")
"""Interrupts under which a whole answer is sampled with one version, so none continues under another."""
UpdateSelection = Literal["full", "adapter", "delta"]
"""What an update holds: all weights, those of an adapter, or the changes since `base`."""

Encoding = Literal["dense", "sparse", "xor"]
"""How the bytes of a bucket travel: as they are, or as changes since the base (`penstock.sync.delta`)."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says where a tensor lies in a publication: its global shape, its dtype, and its bytes in one bucket."""

    name: str
    """The name of the model's own parameter."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Dtype of the values on the wire."""
    bucket: int
    """The bucket that holds it."""
    offset: int
    """Its first byte in the bucket."""
    num_bytes: int
    """Its size in the bucket."""
    start: tuple[int, ...] = ()
    """For a slice, the index of its first element in the whole tensor. Empty: this is the whole tensor."""
    sizes: tuple[int, ...] = ()
    """For a slice, its size in each dimension."""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Describes what travels for a bucket."""

    encoding: Encoding = "dense"
    """How its bytes are encoded."""
    num_bytes: int
    """How many bytes travel."""
    checksum: int | None = None
    """The CRC-32 of its bytes. None where they are read in place, or where an update never leaves GPUs; then
    only the fingerprint is checked."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says how the matrices of an adapter act on the layers that they are named after."""

    rank: int
    """Rank of the product of its two matrices."""
    alpha: float
    """Numerator of the scale."""
    rslora: bool = False
    """Whether to divide alpha by the square root of the rank rather than by the rank."""
    dora: bool = False
    """Whether each row of the weights has its own magnitude; such an adapter is served merged."""

    @property
    def scale(self) -> float:
        """Return the factor of the product of the two matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class WeightUpdate(Record, frozen=True, kw_only=True):
    """Describes a published version, ready to be taken: what to read, where, and the fingerprint of the result."""

    policy: str = DEFAULT_POLICY
    """The policy whose weights these are."""
    version: int
    """The version under which they are served."""
    transport: str
    """The transport: an entry of `penstock.sync.transports`."""
    tensors: tuple[TensorSpec, ...]
    """The tensors in the buckets."""
    buckets: tuple[str, ...]
    """Names by which the transport finds each bucket (a shared-memory name, a file, …)."""
    payloads: tuple[Payload, ...] = ()
    """What travels for each bucket. Empty: buckets as they are, with nothing to check before they are
    loaded."""
    fingerprint: dict[str, int]
    """One hash per tensor name, of the values as an engine must hold them. Hashes of slices add up to it."""
    selection: UpdateSelection = "full"
    """Which part of the weights it holds."""
    base: int | None = None
    """The version that an engine must serve to take this, since the rest of its weights stay as they are. For
    a delta: the version that it was computed against. For an adapter: the version under which the weights
    below it were published. None: the update holds every tensor."""
    adapter: AdapterSpec | None = None
    """The adapter of selection `adapter`. Its tensors are named as peft saves them, without
    `base_model.model.`."""
    sends: bool = False
    """Whether the trainer must `send` while engines stage, as for a broadcast. Otherwise engines just read."""
    receivers: int = 1
    """How many engines stage it together, where it is sent. The pool sets this for each of them."""

    @property
    def is_read_in_place(self) -> bool:
        """Return whether engines load it from where the trainer has it, so that there is nothing to fetch first."""
        return not self.payloads and not self.sends

    @property
    def num_bytes(self) -> int:
        """Return how many bytes travel."""
        return sum(each.num_bytes for each in self.payloads or self.tensors)

    def __post_init__(self) -> None:
        if self.selection != "full" and self.base is None:
            raise ValueError(
                f"version {self.version}: an update of selection {self.selection!r} must name its base"
            )


class UpdateReceipt(Record, frozen=True, kw_only=True):
    """Reports that an engine has taken and verified an update, and what that cost."""

    policy: str
    """The policy whose weights were taken."""
    version: int
    """The version that is served now."""
    stage_s: float = 0.0
    """How long the update was fetched and prepared while the engine kept generating."""
    stall_s: float
    """How long no forward pass could run because of this update; on a GPU, by the device's own clock."""
    verify_s: float
    """How long the fingerprint took after the copies. On a GPU the next passes may have begun before that."""
    drain_s: float = 0.0
    """Under `drain`: how long new requests waited for those in flight to end."""
    recomputed_tokens: int = 0
    """Tokens in flight whose keys and values were dropped and are computed again."""
    discarded_tokens: int = 0
    """Under `abort_retry`: tokens that had been sampled and were thrown away."""
