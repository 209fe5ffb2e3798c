import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loop.spans import numbers_of, with_numbers


@given(st.lists(st.sets(st.integers(0, 40), max_size=6), max_size=8))
def test_spans_hold_what_was_put_in_and_do_not_touch(batches: list[set[int]]) -> None:
    spans, all_numbers = (), set[int]()
    for batch in batches:
        spans = with_numbers(spans, batch - all_numbers)
        all_numbers |= batch
    assert numbers_of(spans) == all_numbers
    assert all(one[1] + 1 < other[0] for one, other in itertools.pairwise(spans))


def test_a_group_is_trained_once() -> None:
    assert with_numbers(((0, 3),), [5, 4]) == ((0, 5),)
    with pytest.raises(AssertionError, match="group 2 is trained twice"):
        with_numbers(((0, 3),), [2])
