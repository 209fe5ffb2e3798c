"""Published weights, and what an engine says when it has taken them."""

from typing import Literal

import msgspec

from penstock.records.base import DEFAULT_POLICY, Record

Interrupt = Literal["inflight", "inflight_recompute", "drain", "abort_resume", "abort_retry"]
"""What happens to sequences in flight when new weights come."""
ONE_VERSION: tuple[Interrupt, ...] = ("drain", "abort_retry")
"""Under these a whole answer is sampled with one version, so none goes on under another."""
UpdateSelection = Literal["full", "adapter", "delta"]
"""What an update holds: the weights themselves, those of an adapter, or what has changed since `base`."""

Encoding = Literal["dense", "sparse", "xor"]
"""How the bytes of a bucket travel: as they are, or as what has changed since the base (`penstock.sync.delta`)."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's place in a publication: its global shape, its dtype and its bytes in one bucket."""

    name: str
    """As the model's own parameters are named."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    """Of the values on the wire."""
    bucket: int
    """Which bucket holds it."""
    offset: int
    """Its first byte there."""
    num_bytes: int
    """How many bytes."""
    start: tuple[int, ...] = ()
    """Of a slice: the index of its first element in the whole tensor. Empty: this is the whole tensor."""
    sizes: tuple[int, ...] = ()
    """Of a slice: how far it reaches in each dimension."""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What travels for a bucket."""

    encoding: Encoding = "dense"
    """How it is written."""
    num_bytes: int
    """How much travels."""
    checksum: int | None = None
    """The CRC-32 of its bytes. None where they are read in place, or all of an update never leaves GPUs: there the
    fingerprint is what is checked."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the matrices of an adapter act on the layers that they are named after."""

    rank: int
    """Of the product of its two matrices."""
    alpha: float
    """What the scale is made from."""
    rslora: bool = False
    """Scale by alpha over the root of the rank, not by alpha over the rank."""
    dora: bool = False
    """Each row of the weights has a magnitude of its own; such an adapter is served merged."""

    @property
    def scale(self) -> float:
        """What the two matrices together are multiplied with."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class WeightUpdate(Record, frozen=True, kw_only=True):
    """A published version, ready to be taken: what to read, where, and what it must add up to."""

    policy: str = DEFAULT_POLICY
    """Whose weights these are."""
    version: int
    """Under which they are served."""
    transport: str
    """How they travel: an entry of `penstock.sync.transports`."""
    tensors: tuple[TensorSpec, ...]
    """What is in the buckets."""
    buckets: tuple[str, ...]
    """Names by which the transport finds each bucket (a shared-memory name, a file, …)."""
    payloads: tuple[Payload, ...] = ()
    """What travels for each bucket. Empty: buckets as they are, with nothing to check before they are loaded."""
    fingerprint: dict[str, int]
    """One hash per tensor name, of the values as an engine must hold them; slices of a tensor add up to it."""
    selection: UpdateSelection = "full"
    """What of the weights it holds."""
    base: int | None = None
    """The version that an engine must serve to take this, since the rest of its weights stay as they are. Of a
    delta: the one that it was taken against. Of an adapter: the one under which the weights below it were
    published. None: the update holds every tensor."""
    adapter: AdapterSpec | None = None
    """Of selection `adapter`: its tensors are named as peft saves them, without `base_model.model.`."""
    sends: bool = False
    """Whether the trainer must `send` while engines stage, as for a broadcast. Otherwise engines read alone."""
    receivers: int = 1
    """How many engines stage it together, where it is sent: the pool says so to each of them."""

    @property
    def is_read_in_place(self) -> bool:
        """Whether engines load it from where the trainer has it: there is nothing to fetch first."""
        return not self.payloads and not self.sends

    @property
    def num_bytes(self) -> int:
        """What travels."""
        return sum(each.num_bytes for each in self.payloads or self.tensors)

    def __post_init__(self) -> None:
        if self.selection != "full" and self.base is None:
            raise ValueError(
                f"version {self.version}: an update of selection {self.selection!r} must name its base"
            )


class UpdateReceipt(Record, frozen=True, kw_only=True):
    """What an engine says after an update: verified, and what it cost."""

    policy: str
    """Whose weights were taken."""
    version: int
    """The one that is served now."""
    stage_s: float = 0.0
    """How long the update was fetched and prepared while the engine went on generating."""
    stall_s: float
    """How long no forward pass could run because of this update; on a GPU, by the device's own clock."""
    verify_s: float
    """How long the fingerprint took after the copies. On a GPU the next passes may have begun by then."""
    drain_s: float = 0.0
    """Under `drain`: how long new requests waited for those in flight to end."""
    recomputed_tokens: int = 0
    """Tokens in flight whose keys and values were given up, and are computed again."""
    discarded_tokens: int = 0
    """Under `abort_retry`: tokens that had been sampled and were thrown away."""
