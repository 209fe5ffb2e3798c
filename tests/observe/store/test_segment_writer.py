from pathlib import Path

from penstock.observe.events import LogLine, Span
from penstock.observe.reading.segment_follower import SegmentFollower
from penstock.observe.store.segments import Kind, segments_of
from tests.observe.store.written import segment_writer


def span(number: int) -> Span:
    name = f"{number * 7919:x}" * 20  # does not compress to nothing
    return Span(process="p", time=2.0 + number, track="t", name=name, start=1.0 + number)


def kept(folder: Path, kind: Kind) -> list[float]:
    return [record.time for frame in SegmentFollower(folder, kind).read() for record in frame.records]


def test_the_newest_stay_within_the_budget(tmp_path: Path) -> None:
    spans = segment_writer(tmp_path, "spans", max_bytes=4000)
    for number in range(200):
        spans.write(number, [span(number)])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000
    spans.close()
    times = kept(tmp_path, "spans")
    assert times == [2.0 + number for number in range(200 - len(times), 200)]
    assert len(times) > 15
    assert len(segments_of(tmp_path, "spans")) > 3


def test_what_is_kept_for_good_has_no_end(tmp_path: Path) -> None:
    facts = segment_writer(tmp_path)
    for number in range(300):
        facts.write(number, [LogLine(process="p", time=float(number), line="x" * 50_000)])
    facts.close()
    assert kept(tmp_path, "facts") == [float(number) for number in range(300)]
    assert segments_of(tmp_path, "facts") == [0, 1]


def test_a_budget_holds_over_sessions(tmp_path: Path) -> None:
    for session in range(12):
        there = segments_of(tmp_path, "spans")
        spans = segment_writer(tmp_path, "spans", max_bytes=2000, number=there[-1] + 1 if there else 0)
        for number in range(5):
            spans.write(0, [span(5 * session + number)])
        spans.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert kept(tmp_path, "spans")[-1] == 61.0


def test_half_of_a_surrogate_pair_costs_nothing(tmp_path: Path) -> None:
    facts = segment_writer(tmp_path)
    facts.write(
        0, [LogLine(process="p", time=1.0, line="half \ud800"), LogLine(process="p", time=2.0, line="x")]
    )
    facts.close()
    (frame,) = SegmentFollower(tmp_path, "facts").read()
    assert [record.line for record in frame.records] == ["half \\ud800", "x"]


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    facts = segment_writer(tmp_path)
    facts.write(0, [LogLine(process="p", time=1.0, line="x")])
    facts.close()
    assert (tmp_path / "facts-000000.seg").stat().st_mode & 0o777 == 0o600
