import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.blob_stores import MemoryBlobs
from penstock.errors import BlobLost
from penstock.records import SamplingMask
from penstock.records.sampling_masks import (
    Packed,
    fetch_mask,
    first_tokens,
    join_packed,
    kept_ids,
    pack_mask,
    pack_token,
    store_mask,
)
from tests.records.builders import kept_rows

VOCAB = 70
"""Three words of bitmask, the last of them short."""


def ids_of(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in rows]


def test_a_bitmask_is_written_where_it_takes_fewer_words() -> None:
    mask = pack_mask(ids_of([[1, 69], [], [0, 31, 32, 69], [5, 6, 7]]), VOCAB)
    assert mask.counts.tolist() == [2, 0, 4, 3]
    assert mask.sizes.tolist() == [2, 0, 3, 3]
    assert mask.words.tolist() == [1, 69, 1 - 2**31, 1, 1 << 5, 5, 6, 7]
    assert mask.words.dtype == mask.counts.dtype == np.int32
    assert kept_rows(mask, [3, 2, 2, 1, 0]) == [[5, 6, 7], [0, 31, 32, 69], [0, 31, 32, 69], [], [1, 69]]


def test_nothing_recorded_is_no_words() -> None:
    for rows in ([], [[], []]):
        mask = pack_mask(ids_of(rows), VOCAB)
        assert (len(mask.counts), len(mask.words)) == (len(rows), 0)
    counts, ids = kept_ids(mask, np.array([1, 0]))
    assert (counts.tolist(), ids.tolist()) == ([0, 0], [])


def test_nearly_all_of_a_large_vocabulary_costs_one_bit_an_id() -> None:
    vocab = 151_936
    kept = np.delete(np.arange(vocab, dtype=np.int32), [7, 90_001])
    mask = pack_mask([kept, kept[:3]], vocab)
    assert mask.words.nbytes == vocab // 8 + 12
    counts, ids = kept_ids(mask, np.array([0]))
    assert counts.tolist() == [vocab - 2]
    np.testing.assert_array_equal(ids, kept)


def test_words_that_do_not_fit_the_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="its counts are of 3 words, got 4"):
        SamplingMask(
            counts=np.array([5], dtype=np.int32), words=np.zeros(4, dtype=np.int32), vocab_size=VOCAB
        )


def test_a_stored_mask_comes_back() -> None:
    blobs = MemoryBlobs()
    mask = pack_mask(ids_of([[3], list(range(9)), []]), VOCAB)
    ref = store_mask(blobs, "group-1/a.mask", mask)
    assert (ref.start, ref.num_tokens, ref.end, ref.vocab_size) == (0, 3, 3, VOCAB)
    assert ref.blob.num_bytes == 4 * (3 + 4)
    assert kept_rows(fetch_mask(blobs, ref), [0, 1, 2]) == [[3], list(range(9)), []]
    empty = store_mask(blobs, "group-1/b.mask", pack_mask([], VOCAB))
    assert len(fetch_mask(blobs, empty).counts) == 0


@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(2, VOCAB), (3, 32), (9, VOCAB)])
def test_a_mask_of_another_shape_is_lost(num_tokens: int, vocab_size: int) -> None:
    """A reference of another model or turn: the sentence names the blob."""
    blobs = MemoryBlobs()
    ref = store_mask(blobs, "group-1/a.mask", pack_mask(ids_of([[3], list(range(9)), []]), VOCAB))
    wrong = msgspec.structs.replace(ref, num_tokens=num_tokens, vocab_size=vocab_size)
    with pytest.raises(BlobLost, match=f"blob group-1/a.mask is no mask of {num_tokens} tokens"):
        fetch_mask(blobs, wrong)


MASK_ROWS = st.integers(1, 130).flatmap(
    lambda vocab: st.tuples(
        st.just(vocab), st.lists(st.sets(st.integers(0, vocab - 1)).map(sorted), min_size=1, max_size=6)
    )
)


@given(MASK_ROWS, st.data())
def test_what_is_packed_comes_back(case: tuple[int, list[list[int]]], data: st.DataObject) -> None:
    vocab, rows = case
    mask = pack_mask(ids_of(rows), vocab)
    assert len(mask.words) == sum(min(len(row), -(-vocab // 32)) for row in rows)
    tokens = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    assert kept_rows(mask, tokens) == [rows[token] for token in tokens]
    blobs = MemoryBlobs()
    stored = fetch_mask(blobs, store_mask(blobs, "a/b", mask))
    assert (stored.counts.tolist(), stored.words.tolist()) == (mask.counts.tolist(), mask.words.tolist())


@given(st.lists(st.sets(st.integers(0, VOCAB - 1), max_size=12), max_size=6), st.data())
def test_tokens_packed_one_by_one_make_the_mask_of_all(rows: list[set[int]], data: st.DataObject) -> None:
    ids = ids_of([sorted(row) for row in rows])
    cut = data.draw(st.integers(0, len(rows)))
    parts = [pack_token(each, VOCAB) for each in ids]
    for mask, kept in ((join_packed(parts, VOCAB), ids), (join_packed(parts[:cut], VOCAB), ids[:cut])):
        expected = pack_mask(kept, VOCAB)
        np.testing.assert_array_equal(mask.counts, expected.counts)
        np.testing.assert_array_equal(mask.words, expected.words)
    whole = pack_mask(ids, VOCAB)
    first = first_tokens(Packed(whole.counts.tolist(), whole.words), cut, VOCAB)
    np.testing.assert_array_equal(first.words, pack_mask(ids[:cut], VOCAB).words)
    assert first.counts == [len(each) for each in ids[:cut]]
