"""Entries as plain data."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gym_datasets import pack, unpack

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(0, 9) | st.tuples(st.integers(0, 9)), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(values)
def test_packed_data_survives_json_with_its_types(value: Any) -> None:
    again = unpack(msgspec.json.decode(msgspec.json.encode(pack(value))))
    assert repr(again) == repr(value)
