from pathlib import Path

from penstock.observe.events import Span
from penstock.observe.reading.frame_index import FrameIndex
from penstock.observe.store.segments import Texts, key_times, segment_path
from tests.observe.store.written import segment_writer


def test_single_frames_are_found_by_their_keys(tmp_path: Path) -> None:
    texts = segment_writer(tmp_path, "texts")
    texts.write(0, [Texts(prompt=f"p{number}", answer="a", message="") for number in range(130)])
    index = FrameIndex(tmp_path, "texts")
    index.refresh()
    assert [place.key for place in index.places] == [0, 64, 128]
    frame = index.read(index.places[1])
    assert frame is not None
    assert (frame.first, len(frame.records), frame.records[0].prompt) == (64, 64, "p64")
    texts.write(1, [Texts(prompt="new", answer="a", message="")])
    index.refresh()
    assert [place.key for place in index.places] == [0, 64, 128, 130]
    segment_path(tmp_path, "texts", 0).unlink()
    assert index.read(index.places[0]) is None
    segment_writer(tmp_path, "texts", number=1, first=100).write(
        2, [Texts(prompt="p", answer="a", message="")]
    )
    index.refresh()
    assert [place.key for place in index.places] == [100]


def test_frames_of_spans_are_found_by_their_times(tmp_path: Path) -> None:
    spans = segment_writer(tmp_path, "spans")
    spans.write(0, [Span(process="p", time=9.25, track="t", name="n", start=3.5)])
    spans.write(1, [Span(process="p", time=1e9, track="t", name="n", start=-1.0)])
    index = FrameIndex(tmp_path, "spans")
    index.refresh()
    assert [key_times(place.key) for place in index.places] == [(3.5, 9.26), (0.0, (2**32 - 1) / 100)]
