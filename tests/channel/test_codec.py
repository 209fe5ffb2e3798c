import msgspec
import numpy as np
import pytest

from penstock.channel.codec import decode, encode
from penstock.sampling_masks import kept_ids, pack_mask
from penstock.types import Chunk, SamplingMask


def test_a_chunk_brings_its_mask_as_ids_and_as_a_bitmask() -> None:
    rows = [np.array([4], np.int32), np.zeros(0, np.int32), np.arange(0, 70, 2, dtype=np.int32)]
    chunk = Chunk(
        token_ids=np.array([4, 5, 6], np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        sampling_mask=pack_mask(rows, 70),
    )
    mask = decode(encode(chunk), Chunk).sampling_mask
    assert mask is not None
    assert mask.vocab_size == 70
    counts, ids = kept_ids(mask, np.array([2, 0]))
    assert counts.tolist() == [35, 1]
    assert ids.tolist() == [*range(0, 70, 2), 4]


def test_a_mask_cut_short_on_the_way_is_refused() -> None:
    mask = pack_mask([np.arange(9, dtype=np.int32)], 70)
    torn = {"counts": mask.counts, "words": mask.words[:2], "vocab_size": 70}
    with pytest.raises(msgspec.ValidationError, match="its counts are of 3 words, got 2"):
        decode(encode(torn), SamplingMask)
