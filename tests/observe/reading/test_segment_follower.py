from pathlib import Path

import msgspec
import pytest

from penstock.errors import UserError
from penstock.observe.events import LogLine
from penstock.observe.reading.segment_follower import SegmentFollower
from penstock.observe.store.segments import SegmentHead, packed, segment_path
from tests.observe.store.written import segment_writer


def line(number: int) -> LogLine:
    return LogLine(process="p", time=float(number), line=str(number))


def lines(follower: SegmentFollower) -> list[str]:
    return [record.line for frame in follower.read() for record in frame.records]


def test_each_call_gives_what_is_new(tmp_path: Path) -> None:
    follower, facts = SegmentFollower(tmp_path, "facts"), segment_writer(tmp_path)
    assert lines(follower) == []
    for number in range(3):
        facts.write(number, [line(number), line(number + 10)])
        assert lines(follower) == [str(number), str(number + 10)]
    assert lines(follower) == []


def test_half_a_frame_is_waited_for(tmp_path: Path) -> None:
    segment_writer(tmp_path).write(0, [line(1)])
    path = segment_path(tmp_path, "facts", 0)
    whole = path.read_bytes()
    for cut in (1, 10, len(whole) - 5):
        path.write_bytes(whole[:cut])
        follower = SegmentFollower(tmp_path, "facts")
        assert lines(follower) == []
        path.write_bytes(whole)
        assert lines(follower) == ["1"]


def test_what_a_crash_has_cut_is_passed_over(tmp_path: Path) -> None:
    facts = segment_writer(tmp_path)
    facts.write(0, [line(1)])
    facts.write(1, [line(2)])
    path = segment_path(tmp_path, "facts", 0)
    path.write_bytes(path.read_bytes()[:-3])
    segment_writer(tmp_path, number=1, first=100).write(2, [line(3)])
    follower = SegmentFollower(tmp_path, "facts")
    assert lines(follower) == ["1", "3"]
    assert follower.num_damaged == 1


def test_segments_that_made_room_are_passed_over(tmp_path: Path) -> None:
    follower = SegmentFollower(tmp_path, "facts")
    segment_writer(tmp_path).write(0, [line(1)])
    assert lines(follower) == ["1"]
    segment_path(tmp_path, "facts", 0).unlink()
    for number in (3, 4):
        segment_writer(tmp_path, number=number, first=100 * number).write(number, [line(number)])
    assert lines(follower) == ["3", "4"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    head = SegmentHead(format=9, kind="facts", session=0, offset_s=0.0)
    segment_path(tmp_path, "facts", 0).write_bytes(packed(msgspec.msgpack.encode(head), "head"))
    with pytest.raises(UserError, match="events of format 9, and this version of penstock reads format 1"):
        SegmentFollower(tmp_path, "facts").read()
