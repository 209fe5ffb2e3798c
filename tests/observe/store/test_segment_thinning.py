"""What stays of a long run's samples when there is no room for all."""

from pathlib import Path

import msgspec
import pytest

from penstock.observe.events import SampleEvent
from penstock.observe.reading.frame_index import FrameIndex
from penstock.observe.reading.sample_table import SampleTable
from penstock.observe.reading.segment_follower import SegmentFollower
from penstock.observe.store import segment_writer
from penstock.observe.store.segment_thinning import WholeSegment, read_segment, thin_out, write_segment
from penstock.observe.store.segment_writer import SegmentWriter
from penstock.observe.store.segments import SegmentHead, Texts, segment_path, segments_of
from tests.observe.examples import SAMPLE

BUDGET = 40_000
HEAD = SegmentHead(format=1, kind="texts", session=0, offset_s=5.0)


def writer(folder: Path, session: int = 0) -> SegmentWriter:
    there = segments_of(folder, "texts")
    return SegmentWriter(
        folder,
        msgspec.structs.replace(HEAD, session=session),
        number=there[-1] + 1 if there else 0,
        first=session << 32,
        max_bytes=BUDGET,
    )


def text(number: int) -> Texts:
    return Texts(prompt=f"prompt {number}", answer=f"{number * 7919:x}" * 10, message="")


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def kept(folder: Path) -> list[int]:
    return [frame.first for frame in SegmentFollower(folder, "texts").read()]


def test_every_part_of_a_long_run_keeps_a_share_and_the_newest_half_is_whole(tmp_path: Path) -> None:
    texts, count = writer(tmp_path), 6000
    for number in range(count):
        texts.write(number, [text(number)])
        assert total(tmp_path) <= BUDGET
    texts.close()
    numbers = kept(tmp_path)
    assert numbers == sorted(set(numbers))
    in_full = next(size for size in range(1, count) if count - 1 - size not in numbers)
    assert numbers[0] == 0
    assert in_full >= len(numbers) / 3
    old = [number for number in numbers if number < count - in_full]
    parts = [sum(start <= number < start + 600 for number in old) for start in range(0, 5400, 600)]
    assert min(parts) >= 3
    assert max(parts) <= 4 * min(parts)
    assert len(segments_of(tmp_path, "texts")) < 20


def test_the_level_is_known_to_the_next_session(tmp_path: Path) -> None:
    for session in range(12):
        texts = writer(tmp_path, session)
        for number in range(500):
            texts.write(number, [text(number)])
        texts.close()
        assert total(tmp_path) <= BUDGET
    sessions = [number >> 32 for number in kept(tmp_path)]
    assert set(sessions) == set(range(12))
    heads = [read_segment(segment_path(tmp_path, "texts", one)) for one in segments_of(tmp_path, "texts")]
    levels = [segment.head.thinned for segment in heads if segment is not None]
    assert levels[0] >= 3
    assert levels[-1] == 0
    assert sorted(levels, reverse=True) == levels


def test_who_follows_reads_every_record_once_and_finds_the_texts_that_are_left(tmp_path: Path) -> None:
    texts, index = writer(tmp_path), FrameIndex(tmp_path, "texts")
    table, follower, seen = SampleTable(index), SegmentFollower(tmp_path, "texts"), []
    for number in range(2000):
        texts.write(number, [text(number)])
        table.add(number, sample_of(number))
        if number % 7 == 0:
            seen += [frame.first for frame in follower.read()]
        if number % 50 == 0:
            assert table.read(number).prompt == f"prompt {number}"
    texts.close()
    seen += [frame.first for frame in follower.read()]
    assert seen == list(range(2000))
    assert follower.num_damaged == 0
    left = set(kept(tmp_path))
    for number in range(2000):
        read = table.read(number)
        assert read.text_kept == (number in left), number
        assert not read.text_kept or read.answer == text(number).answer


def sample_of(number: int) -> SampleEvent:
    return msgspec.structs.replace(SAMPLE, group=number, prompt="", answer="", text_kept=True)


def test_a_slow_reader_goes_on_after_what_it_has_read(tmp_path: Path) -> None:
    """The segment that it was at has been thinned under it."""
    path = segment_path(tmp_path, "texts", 0)
    texts = SegmentWriter(tmp_path, HEAD, number=0, first=0, max_bytes=None)
    for number in range(10):
        texts.write(number, [text(number)])
    follower = SegmentFollower(tmp_path, "texts")
    assert len(follower.read()) == 10
    for number in range(10, 20):
        texts.write(number, [text(number)])
    texts.close()
    segment = read_segment(path)
    assert segment is not None
    write_segment(path, segment.thinned(1))
    assert [frame.first for frame in follower.read()] == [10, 12, 14, 16, 18]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_crash_left_is_no_segment_and_a_cut_end_is_left_out(tmp_path: Path) -> None:
    texts = SegmentWriter(tmp_path, HEAD, number=0, first=0, max_bytes=None)
    for number in range(4):
        texts.write(number, [text(number)])
    texts.close()
    path = segment_path(tmp_path, "texts", 0)
    path.write_bytes(path.read_bytes()[:-3])
    (tmp_path / "texts-000000.seg.part").write_bytes(b"half")
    writer(tmp_path)
    assert not (tmp_path / "texts-000000.seg.part").exists()
    segment = read_segment(path)
    assert segment is not None
    assert len(segment.frames) == 3
    path.write_bytes(b"")
    assert read_segment(path) is None
    thin_out([path], 100, 100)
    assert not path.exists()


def test_segments_of_other_sessions_are_not_put_together() -> None:
    one = WholeSegment(HEAD, (b"a" * 20,) * 8)
    assert one.thinned(2).frames == (b"a" * 20,) * 2
    assert one.thinned(2).thinned(3).frames == (b"a" * 20,)
    assert one.thinned(0) is one


def test_without_room_to_copy_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_writer, "thin_out", full)
    texts = writer(tmp_path)
    for number in range(2000):
        texts.write(number, [text(number)])
        assert total(tmp_path) <= BUDGET
    texts.close()
    numbers = kept(tmp_path)
    assert numbers == list(range(numbers[0], 2000))
