import time
from pathlib import Path

from penstock.orchestration.standing_file import NAME, read_standing, write_standing


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    assert read_standing(tmp_path) is None
    write_standing(tmp_path, ["one"])
    write_standing(tmp_path, ["trainer – step 3", "groups: …"])
    standing = read_standing(tmp_path)
    assert standing is not None
    assert standing.lines == ("trainer – step 3", "groups: …")
    assert abs(standing.wall_s - time.time()) < 60
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_disk_without_room_and_a_torn_file_cost_nothing(tmp_path: Path) -> None:
    write_standing(tmp_path / "gone", ["one"])
    (tmp_path / NAME).write_bytes(b'{"wall_s": 3, "li')
    assert read_standing(tmp_path) is None
