import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.trace.trace_file import (
    TraceFile,
    data,
    double,
    fixed64,
    integer,
    nanoseconds,
    text,
    varint,
)
from tests.observe.trace.wire import descriptors, events, fields, number


def test_tracks_slices_and_arrows() -> None:
    file = io.BytesIO()
    trace = TraceFile(file)
    process = trace.process("engine0")
    slot, counter = trace.track(process, "slot 0"), trace.counter_track(process, "running")
    trace.begin(slot, 1.5, "generate", {"request": "g1.0.0", "tokens": -3, "s": 0.5}, flows=[7, 8], ends=[9])
    trace.end(slot, 2.0)
    trace.count(counter, 2.0, 3.5)
    trace.flush()
    described = descriptors(file.getvalue())
    assert [one[1] for one in described] == [[process], [slot], [counter]]
    assert described[1][2] == [b"slot 0"] and described[1][5] == [process]
    assert described[2][8] == [b""]
    begin, end, count = events(file.getvalue())
    assert (begin[0], begin[1][9], begin[1][11], begin[1][23]) == (1_500_000_000, [1], [slot], [b"generate"])
    assert [number(flow) for flow in begin[1][47]] == [7, 8]
    assert [number(flow) for flow in begin[1][48]] == [9]
    assert len(begin[1][4]) == 3
    assert (end[0], end[1][9], end[1][11]) == (2_000_000_000, [2], [slot])
    assert count[1][9] == [4]
    assert (trace.num_slices, trace.num_flows) == (1, 2)


def test_times_are_whole_and_never_negative() -> None:
    assert (nanoseconds(-1.0), nanoseconds(0.5)) == (0, 500_000_000)


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
