import numpy as np
import pytest

from penstock.engines.embedded.cuda.mask_arena import MaskTable
from penstock.records.sampling_masks import join_packed, pack_mask

VOCAB = 100
"""Four words of bitmask."""


def bitmask(ids: list[int]) -> list[int]:
    flags = np.zeros(128, dtype=np.bool_)
    flags[ids] = True
    words: list[int] = np.packbits(flags, bitorder="little").view(np.int32).tolist()
    return words


MANY = list(range(0, 90, 7))
"""More than four."""


@pytest.mark.parametrize("as_ids", [False, True], ids=["as bitmasks", "as ids"])
def test_rows_come_in_order_whatever_the_order_in_which_they_were_written(as_ids: bool) -> None:
    words = [7, 8, 9] + (MANY if as_ids else bitmask(MANY)) + [1, 99, 55]
    long = len(MANY) if as_ids else -len(MANY)
    after = 3 + (len(MANY) if as_ids else 4)
    sizes = np.array([[2, 0], [3, long], [0, 1]], dtype=np.int32)
    places = np.array([[after, -5], [0, 3], [77, after + 2]], dtype=np.int32)
    table = MaskTable(sizes, places, np.array(words, dtype=np.int32), VOCAB)
    rows = [[[1, 99], []], [[7, 8, 9], MANY], [[], [55]]]
    for row, kept in enumerate(rows):
        for count in range(3):
            expected = pack_mask([np.array(ids, dtype=np.int32) for ids in kept[:count]], VOCAB)
            mask = join_packed([table.packed(row, count)], VOCAB)
            assert mask.counts.tolist() == expected.counts.tolist()
            assert mask.words.tolist() == expected.words.tolist()
