"""Sampling masks: packed by an engine, joined by the runner, read by the trainer.

A token's kept ids are stored as they are, or as a bitmask of the vocabulary where that takes fewer words.
"""

from collections.abc import Sequence

import numpy as np

from penstock.types import BoolArray, Chunk, IntArray, SamplingMask

_WORD = np.dtype("<i4")


def pack_mask(kept: Sequence[IntArray], vocab_size: int) -> SamplingMask:
    """The mask of tokens with these kept ids, ascending; no ids: nothing was cut."""
    counts = np.array([len(ids) for ids in kept], dtype=np.int32)
    words = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int32)
    bitmask_words = SamplingMask.bitmask_words(vocab_size)
    is_bitmask = counts > bitmask_words
    if is_bitmask.any():
        sizes = np.minimum(counts, bitmask_words)
        of_bitmask, in_bitmask = np.repeat(is_bitmask, counts), np.repeat(is_bitmask, sizes)
        ids, words = words, np.empty(len(in_bitmask), dtype=np.int32)
        words[~in_bitmask] = ids[~of_bitmask]
        flags = np.zeros((int(is_bitmask.sum()), 32 * bitmask_words), dtype=np.bool_)
        flags[np.repeat(np.arange(len(flags)), counts[is_bitmask]), ids[of_bitmask]] = True
        words[in_bitmask] = _words_of(flags).reshape(-1)
    return SamplingMask(counts=counts, words=words, vocab_size=vocab_size)


def kept_ids(mask: SamplingMask, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """How many ids each of these tokens kept, and the ids, joined and ascending within a token."""
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


def join_masks(chunks: Sequence[Chunk]) -> SamplingMask | None:
    """The masks of a generation's chunks as one. A chunk without one cut nothing."""
    recorded = [chunk.sampling_mask for chunk in chunks if chunk.sampling_mask is not None]
    if not recorded:
        return None
    counts = [
        np.zeros(len(chunk.token_ids), dtype=np.int32)
        if chunk.sampling_mask is None
        else chunk.sampling_mask.counts
        for chunk in chunks
    ]
    return SamplingMask(
        counts=np.concatenate(counts),
        words=np.concatenate([mask.words for mask in recorded]),
        vocab_size=recorded[0].vocab_size,
    )


def _words_of(flags: BoolArray) -> IntArray:
    return np.packbits(flags, axis=1, bitorder="little").view(_WORD)


def _flags_of(words: IntArray) -> np.ndarray:
    return np.unpackbits(words.astype(_WORD, copy=False).view(np.uint8), axis=1, bitorder="little")
