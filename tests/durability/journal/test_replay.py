"""A torn tail is cut; everything else that is wrong is an error in words."""

import pytest

from benchmarks.crashes.power_loss import PowerLossFiles
from penstock.durability.journal.frames import JournalDamaged, frame, header
from penstock.durability.journal.replay import BASE, base_file, mend, replay, segment_name

ONE = header() + frame(1, [b"a", b"b"])
TWO = frame(2, [b"c"])


def read(files: PowerLossFiles) -> list[tuple[bytes, int]]:
    found: list[tuple[bytes, int]] = []
    mend(files, replay(files, lambda record, segment: found.append((record, segment))))
    return found


@pytest.mark.parametrize("kept", range(len(TWO)))
def test_a_torn_tail_is_cut(kept: int) -> None:
    files = PowerLossFiles({segment_name(1): ONE + TWO[:kept]})
    end = replay(files, lambda record, segment: None)
    assert (end.size, end.sequence, end.torn_bytes) == (len(ONE), 1, kept)
    assert read(files) == [(b"a", 1), (b"b", 1)]
    assert files.durable[segment_name(1)] == ONE


def test_a_segment_whose_header_is_torn_is_begun_anew() -> None:
    files = PowerLossFiles({segment_name(1): ONE, segment_name(2): header()[:7]})
    assert read(files) == [(b"a", 1), (b"b", 1)]
    assert files.durable[segment_name(2)] == b""


@pytest.mark.parametrize("where", range(len(header()), len(ONE)))
def test_a_bad_record_before_good_ones_is_damage(where: int) -> None:
    bad = bytearray(ONE + TWO)
    bad[where] ^= 0x40
    with pytest.raises(JournalDamaged, match="segment-00000001.journal is damaged at byte 20: a checksum"):
        read(PowerLossFiles({segment_name(1): bytes(bad)}))


def test_a_bad_end_of_an_older_segment_is_damage() -> None:
    later = header() + frame(3, [b"d"])
    with pytest.raises(JournalDamaged, match="segment-00000001.journal is damaged"):
        read(PowerLossFiles({segment_name(1): ONE + TWO[:-1], segment_name(2): later}))


def test_a_missing_segment_is_damage() -> None:
    files = PowerLossFiles({segment_name(1): ONE, segment_name(3): header() + frame(3, [b"d"])})
    with pytest.raises(JournalDamaged, match="segment-00000002.journal of the journal is missing"):
        read(files)


def test_missing_commits_are_damage() -> None:
    files = PowerLossFiles({segment_name(1): ONE, segment_name(2): header() + frame(3, [b"d"])})
    with pytest.raises(JournalDamaged, match="continues with commit 3 after 1: records are missing"):
        read(files)


def test_an_unknown_format_is_refused() -> None:
    data = bytearray(ONE)
    data[16] = 9
    with pytest.raises(JournalDamaged, match="has format 9, and this Penstock reads format 2"):
        read(PowerLossFiles({segment_name(1): bytes(data)}))


def test_segments_before_the_base_do_not_count_and_go() -> None:
    second = header() + frame(2, [b"c"])
    files = PowerLossFiles(
        {segment_name(1): ONE, segment_name(2): second, BASE: base_file(2, b"a and b are over")}
    )
    assert read(files) == [(b"c", 2)]
    assert sorted(files.durable) == [BASE, segment_name(2)]
