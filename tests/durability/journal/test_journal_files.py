"""The files of a real folder do what the files that lose power promise."""

from pathlib import Path

from penstock.durability.journal.journal_files import DiskFiles


def test_files_are_appended_cut_replaced_and_removed(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path / "journal")
    files.append("a", b"123")
    files.append("a", b"456")
    files.sync("a")
    files.append("b", b"x")
    files.append("a", b"7")
    assert (files.read("a"), files.names()) == (b"1234567", ["a", "b"])
    files.cut("a", 2)
    files.append("a", b"9")
    assert files.read("a") == b"129"
    files.replace("b", b"other")
    assert files.read("b") == b"other"
    files.remove("a")
    assert files.names() == ["b"]
    assert (tmp_path / "journal" / "b").stat().st_mode & 0o777 == 0o600
    files.close()
