"""Packs, stores and reads sampling masks, which engines record and the trainer fetches.

The kept ids of a token are stored as they are, or as a bitmask of the vocabulary where that takes fewer
words.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import BlobLost
from penstock.records import BoolArray, IntArray, MaskRef, SamplingMask
from penstock.records.interfaces import BlobStore

_WORD = np.dtype("<i4")


class Packed(NamedTuple):
    """Holds part of a mask: `counts` and `words` of some tokens, as in `SamplingMask`."""

    counts: list[int]
    words: IntArray


NO_WORDS: IntArray = np.zeros(0, dtype=np.int32)


def pack_mask(kept: Sequence[IntArray], vocab_size: int) -> SamplingMask:
    """Make the mask of tokens that kept these ids, ascending. No ids means that nothing was cut."""
    counts = np.array([len(ids) for ids in kept], dtype=np.int32)
    ids = np.concatenate(kept) if kept else NO_WORDS
    words = shorten(counts, ids, np.ones(len(counts), dtype=np.bool_), vocab_size)
    return SamplingMask(counts=counts, words=words, vocab_size=vocab_size)


def pack_token(ids: IntArray, vocab_size: int) -> Packed:
    """Pack the kept ids of one token."""
    if len(ids) <= SamplingMask.bitmask_words(vocab_size):
        return Packed([len(ids)], ids)
    return Packed([len(ids)], pack_mask([ids], vocab_size).words)


def first_tokens(packed: Packed, count: int, vocab_size: int) -> Packed:
    """Return the part that belongs to the first `count` tokens."""
    if count == len(packed.counts):
        return packed
    most = SamplingMask.bitmask_words(vocab_size)
    counts = packed.counts[:count]
    return Packed(counts, packed.words[: sum(min(each, most) for each in counts)])


def join_packed(parts: Sequence[Packed], vocab_size: int) -> SamplingMask:
    counts = np.array([count for part in parts for count in part.counts], dtype=np.int32)
    words = np.concatenate([part.words for part in parts]) if parts else NO_WORDS
    return SamplingMask(counts=counts, words=words, vocab_size=vocab_size)


def shorten(counts: IntArray, words: IntArray, holds_ids: BoolArray, vocab_size: int) -> IntArray:
    """Replace ids by a bitmask wherever that takes fewer words. `holds_ids` marks the tokens whose words are
    ids."""
    most = SamplingMask.bitmask_words(vocab_size)
    changes = holds_ids & (counts > most)
    if not changes.any():
        return words
    before = np.repeat(changes, np.where(holds_ids, counts, most))
    after = np.repeat(changes, np.minimum(counts, most))
    shorter = np.empty(len(after), dtype=np.int32)
    shorter[~after] = words[~before]
    flags = np.zeros((int(changes.sum()), 32 * most), dtype=np.bool_)
    flags[np.repeat(np.arange(len(flags)), counts[changes]), words[before]] = True
    shorter[after] = _words_of(flags).reshape(-1)
    return shorter


def kept_ids(mask: SamplingMask, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Return how many ids each of these tokens kept, and the ids, joined and ascending within a token."""
    counts, sizes = mask.counts[tokens], mask.sizes[tokens]
    starts = (np.cumsum(mask.sizes, dtype=np.int64) - mask.sizes)[tokens]
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    words = mask.words[np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))]
    is_bitmask = counts > sizes
    if not is_bitmask.any():
        return counts, words
    of_bitmask, in_bitmask = np.repeat(is_bitmask, counts), np.repeat(is_bitmask, sizes)
    ids = np.empty(len(of_bitmask), dtype=np.int32)
    ids[~of_bitmask] = words[~in_bitmask]
    ids[of_bitmask] = np.nonzero(_flags_of(words[in_bitmask].reshape(int(is_bitmask.sum()), -1)))[1]
    return counts, ids


def store_mask(blobs: BlobStore, key: str, mask: SamplingMask, *, start: int = 0) -> MaskRef:
    """Store the mask of the output tokens from `start` on: its counts, then its words."""
    data = mask.counts.astype(_WORD, copy=False).tobytes() + mask.words.astype(_WORD, copy=False).tobytes()
    return MaskRef(
        start=start, num_tokens=len(mask.counts), vocab_size=mask.vocab_size, blob=blobs.put(key, data)
    )


def fetch_mask(blobs: BlobStore, ref: MaskRef) -> SamplingMask:
    """Fetch a mask. Raise `BlobLost` if it is missing, damaged or of another shape."""
    data = blobs.get(ref.blob)
    try:
        numbers: IntArray = np.frombuffer(data, dtype=_WORD)
        return SamplingMask(
            counts=numbers[: ref.num_tokens], words=numbers[ref.num_tokens :], vocab_size=ref.vocab_size
        )
    except ValueError as error:
        raise BlobLost(f"blob {ref.blob.key} is no mask of {ref.num_tokens} tokens: {error}") from error


def _words_of(flags: BoolArray) -> IntArray:
    return np.packbits(flags, axis=1, bitorder="little").view(_WORD)


def _flags_of(words: IntArray) -> np.ndarray:
    return np.unpackbits(words.astype(_WORD, copy=False).view(np.uint8), axis=1, bitorder="little")
