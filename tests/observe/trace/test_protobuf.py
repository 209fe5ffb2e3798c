import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.trace.protobuf import data, double, fixed64, integer, text, varint
from tests.observe.trace.wire import fields, number


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, b"\x00"),
        (1, b"\x01"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (300, b"\xac\x02"),
        (-1, b"\xff" * 9 + b"\x01"),
    ],
)
def test_a_varint_is_as_protobufs_documentation_has_it(value: int, encoded: bytes) -> None:
    assert varint(value) == encoded


@given(st.integers(1, 500), st.integers(0, 2**63), st.floats(allow_nan=False), st.text())
def test_every_field_is_read_back(field: int, value: int, real: float, word: str) -> None:
    message = (
        integer(field, value)
        + fixed64(field, value)
        + double(field, real)
        + data(field, b"x")
        + text(1, word)
    )
    found = list(fields(message))
    assert [one[0] for one in found] == [field] * 4 + [1]
    assert found[0][1] == number(found[1][1]) == value
    assert struct.unpack("<d", found[2][1])[0] == real
    assert found[3][1] == b"x"
    assert found[4][1] == word.encode("utf-8", "replace")
