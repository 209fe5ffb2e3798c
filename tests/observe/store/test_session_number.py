from pathlib import Path

from penstock.observe.store.session_number import next_session, read_head
from tests.observe.examples import run_event
from tests.observe.store.written import write


def test_sessions_are_counted_by_those_that_wrote(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    assert next_session(tmp_path / "events") == 0
    for session in range(3):
        write(tmp_path, [run_event()])
        assert next_session(tmp_path / "events") == session + 1


def test_a_segment_without_a_head_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, [run_event()])
    empty = tmp_path / "events" / "facts-000001.seg"
    empty.write_bytes(b"\x01\x02")
    assert read_head(empty) is None
    assert read_head(empty.with_name("gone")) is None
    assert next_session(tmp_path / "events") == 1
