from pathlib import Path

import pytest

from penstock.observe.store.segments import HEADER, KINDS, packed, segment_path, segments_of, unpacked


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_read_back_in_order_with_their_ends(kind: str) -> None:
    data = packed(b"first", kind, 7) + packed(b"", kind) + packed(b"x" * 300, kind)
    found = list(unpacked(data, kind))
    assert [payload for _, payload in found] == [b"first", b"", b"x" * 300]
    assert found[-1][0] == len(data)
    assert [payload for _, payload in unpacked(data, kind, found[0][0])] == [b"", b"x" * 300]
    assert HEADER.unpack_from(data)[2] == 7


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_frame_that_is_cut_anywhere_is_left_out(cut: int) -> None:
    data = packed(b"whole", "facts") + packed(b"cut here", "facts")
    assert [payload for _, payload in unpacked(data[:-cut], "facts")] == [b"whole"]


@pytest.mark.parametrize("place", [0, 4, 20])
def test_nothing_after_damage_is_believed(place: int) -> None:
    data = bytearray(packed(b"damaged", "facts") + packed(b"behind it", "facts"))
    data[place] ^= 0xFF
    assert [payload for _, payload in unpacked(bytes(data), "facts")] == []


def test_segments_are_found_by_their_kind(tmp_path: Path) -> None:
    for name in (
        "facts-000002.seg",
        "facts-000010.seg",
        "texts-000001.seg",
        "facts-1.seg",
        "facts-000003.tmp",
    ):
        (tmp_path / name).touch()
    assert segments_of(tmp_path, "facts") == [2, 10]
    assert segment_path(tmp_path, "facts", 10) == tmp_path / "facts-000010.seg"
