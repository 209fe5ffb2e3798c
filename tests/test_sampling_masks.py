import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sampling_masks import (
    Packed,
    first_tokens,
    join_masks,
    join_packed,
    kept_ids,
    pack_mask,
    pack_token,
)
from penstock.types import Chunk, SamplingMask

VOCAB = 70
"""Three words of bitmask, the last of them short."""


def ids_of(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in rows]


def rows_of(mask: SamplingMask, tokens: list[int]) -> list[list[int]]:
    counts, ids = kept_ids(mask, np.array(tokens, dtype=np.int64))
    assert ids.dtype == np.int32
    return [row.tolist() for row in np.split(ids, np.cumsum(counts)[:-1])]


def chunk_of(num_tokens: int, mask: SamplingMask | None) -> Chunk:
    zeros = np.zeros(num_tokens, dtype=np.int32)
    return Chunk(token_ids=zeros, logprobs=zeros.astype(np.float32), versions=zeros, sampling_mask=mask)


def test_a_bitmask_is_written_where_it_takes_fewer_words() -> None:
    mask = pack_mask(ids_of([[1, 69], [], [0, 31, 32, 69], [5, 6, 7]]), VOCAB)
    assert mask.counts.tolist() == [2, 0, 4, 3]
    assert mask.sizes.tolist() == [2, 0, 3, 3]
    assert mask.words.tolist() == [1, 69, 1 - 2**31, 1, 1 << 5, 5, 6, 7]
    assert mask.words.dtype == mask.counts.dtype == np.int32
    assert rows_of(mask, [3, 2, 2, 1, 0]) == [[5, 6, 7], [0, 31, 32, 69], [0, 31, 32, 69], [], [1, 69]]


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


def test_chunks_without_a_mask_cut_nothing() -> None:
    first = pack_mask(ids_of([[3], list(range(9))]), VOCAB)
    last = pack_mask(ids_of([[0, 4]]), VOCAB)
    joined = join_masks([chunk_of(2, first), chunk_of(3, None), chunk_of(1, last)])
    assert joined is not None
    assert joined.vocab_size == VOCAB
    assert rows_of(joined, [0, 1, 2, 3, 4, 5]) == [[3], list(range(9)), [], [], [], [0, 4]]
    assert join_masks([chunk_of(2, None)]) is None


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
    assert rows_of(mask, tokens) == [rows[token] for token in tokens]
    cut = data.draw(st.integers(0, len(rows)))
    pieces = [rows[:cut], rows[cut:]]
    joined = join_masks([chunk_of(len(piece), pack_mask(ids_of(piece), vocab)) for piece in pieces])
    assert joined is not None
    assert (joined.counts.tolist(), joined.words.tolist()) == (mask.counts.tolist(), mask.words.tolist())


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
