from pathlib import Path

import pytest

from penstock.safe_files import remove_folder, whole_folder, write_private


def test_a_file_is_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_private(path, "one")
    write_private(path, "two – é")
    assert path.read_text(encoding="utf-8") == "two – é"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UnicodeEncodeError):
        write_private(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "two – é"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_its_place_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"

    def fill_the_disk() -> None:
        with whole_folder(target) as folder:
            (folder / "weights").write_text("half")
            raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        fill_the_disk()
    assert list(target.parent.iterdir()) == []
    for content in ("one", "two"):
        with whole_folder(target) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / content).write_text(content)
    assert [path.name for path in (target / "inner").iterdir()] == ["two"]
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o700


def test_a_folder_is_removed_whole(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    remove_folder(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
