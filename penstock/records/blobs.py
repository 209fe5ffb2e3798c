"""Refers to bulk data: large data travels through a blob store, and records say where it is."""

import msgspec


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """Refers to bytes in a `penstock.records.interfaces.BlobStore`. A scope is deleted as a whole."""

    key: str
    """`scope/name`."""
    num_bytes: int
    """The size of the bytes."""
    checksum: int
    """CRC-32 of the bytes."""


class MaskRef(msgspec.Struct, frozen=True, kw_only=True):
    """Refers to a recorded sampling mask in the store: that of `num_tokens` tokens from `start` on.

    In a chunk or a turn `start` counts output tokens, in a sample all of its tokens.
    """

    start: int
    """The first token."""
    num_tokens: int
    """How many tokens."""
    vocab_size: int
    """Size of the model's vocabulary."""
    blob: BlobRef
    """Where the mask is."""

    @property
    def end(self) -> int:
        """Return one past the last token."""
        return self.start + self.num_tokens

    def shifted(self, by: int) -> "MaskRef":
        """Return the same mask for a sequence in which `by` more tokens precede it."""
        return msgspec.structs.replace(self, start=self.start + by)


class RoutingShape(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a record of chosen experts must be like to fit a model."""

    family: str
    """The model's class."""
    num_layers: int
    """Number of routers: one in each layer that has experts."""
    num_experts: int
    """How many experts each router chooses from."""
    top_k: int
    """How many experts a router chooses for a token."""

    @property
    def id_bytes(self) -> int:
        """Return the bytes of one id."""
        return 1 if self.num_experts <= 256 else 2

    @property
    def token_bytes(self) -> int:
        """Return the bytes of all ids of a token."""
        return self.num_layers * self.top_k * self.id_bytes


class RoutingRef(msgspec.Struct, frozen=True, kw_only=True):
    """Refers to recorded routes in the store: the experts of `num_tokens` tokens from `start` on. Prompt tokens
    count too."""

    start: int
    """The first token."""
    num_tokens: int
    """How many tokens."""
    shape: RoutingShape
    """The shape of the model that chose."""
    blob: BlobRef
    """Where the routes are."""
    first: int = 0
    """The row of the first token in the blob."""

    @property
    def end(self) -> int:
        """Return one past the last token."""
        return self.start + self.num_tokens

    def within(self, start: int, end: int) -> "RoutingRef | None":
        """Return the part for tokens `start` to `end`, or None if there is none."""
        start, end = max(start, self.start), min(end, self.end)
        if start >= end:
            return None
        return msgspec.structs.replace(
            self, start=start, num_tokens=end - start, first=self.first + start - self.start
        )


def routes_within(refs: "tuple[RoutingRef, ...]", start: int, end: int) -> "tuple[RoutingRef, ...]":
    """Return the parts of these for tokens `start` to `end`."""
    parts = (ref.within(start, end) for ref in refs)
    return tuple(part for part in parts if part is not None)


def group_scope(number: int) -> str:
    """Return the scope of all blobs of a group, which are deleted when the group has been trained or dropped."""
    return f"group-{number}"


def check_masks(what: str, masks: tuple[MaskRef, ...], num_tokens: int) -> None:
    """Check that masks are in order, do not overlap, and end within `num_tokens` tokens."""
    _check_order(f"{what}: its sampling masks", [(mask.start, mask.end) for mask in masks], num_tokens)


def check_routes(what: str, routes: tuple[RoutingRef, ...], num_tokens: int) -> None:
    """Check that recorded routes are in order, do not overlap, and end within `num_tokens` tokens."""
    _check_order(f"{what}: its routes", [(route.start, route.end) for route in routes], num_tokens)


def _check_order(what: str, spans: list[tuple[int, int]], num_tokens: int) -> None:
    if not spans:
        return
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), num_tokens]
    if any(start < end for start, end in zip(starts, ends, strict=True)):
        raise ValueError(f"{what} must lie in order within {num_tokens} tokens, got {spans}")
