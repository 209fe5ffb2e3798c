"""Bulk data by reference: what is large travels through a blob store, and records carry where it is."""

import msgspec


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in a `penstock.interfaces.BlobStore`. `key` is `scope/name`; blobs are deleted by their scope."""

    key: str
    """`scope/name`."""
    num_bytes: int
    """Its size."""
    checksum: int
    """CRC-32 of the bytes."""


class MaskRef(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded sampling mask in the store: that of `num_tokens` tokens from `start` on.

    In a chunk or a turn `start` counts output tokens, in a sample all of its tokens."""

    start: int
    """The first token."""
    num_tokens: int
    """How many."""
    vocab_size: int
    """Of the model."""
    blob: BlobRef
    """Where the mask is."""

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.num_tokens

    def shifted(self, by: int) -> "MaskRef":
        """The same mask, where `by` more tokens come before it."""
        return msgspec.structs.replace(self, start=self.start + by)


def group_scope(number: int) -> str:
    """The scope of all blobs of a group: they go when the group has been trained or dropped."""
    return f"group-{number}"


def check_masks(what: str, masks: tuple[MaskRef, ...], num_tokens: int) -> None:
    """Masks come in order, do not overlap and end within the tokens that they are of."""
    if not masks:
        return
    ends = [0, *(mask.end for mask in masks)]
    starts = [*(mask.start for mask in masks), num_tokens]
    if any(start < end for start, end in zip(starts, ends, strict=True)):
        spans = [(mask.start, mask.end) for mask in masks]
        raise ValueError(
            f"{what}: its sampling masks must lie in order within {num_tokens} tokens, got {spans}"
        )
