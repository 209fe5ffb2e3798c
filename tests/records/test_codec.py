import msgspec
import numpy as np
import pytest

from penstock.records import BlobRef, Chunk, MaskRef, SamplingMask
from penstock.records.codec import decode, encode
from penstock.records.sampling_masks import pack_mask
from tests.records.builders import make_chunk


def test_a_chunk_brings_the_reference_to_its_mask() -> None:
    blob = BlobRef(key="group-1/a.mask", num_bytes=12, checksum=2**32 - 1)
    mask = MaskRef(start=0, num_tokens=3, vocab_size=70, blob=blob)
    chunk = make_chunk([4, 5, 6], sampling_mask=mask)
    assert decode(encode(chunk), Chunk).sampling_mask == chunk.sampling_mask


def test_a_mask_cut_short_on_the_way_is_refused() -> None:
    mask = pack_mask([np.arange(9, dtype=np.int32)], 70)
    torn = {"counts": mask.counts, "words": mask.words[:2], "vocab_size": 70}
    with pytest.raises(msgspec.ValidationError, match="its counts are of 3 words, got 2"):
        decode(encode(torn), SamplingMask)
