import re
import zlib
from pathlib import Path

import pytest

from penstock import checksums
from penstock.checksums import check_files, checksum_of, write_checksums
from penstock.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"")
    write_checksums(tmp_path)
    return tmp_path


def refuse(folder: Path, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_files(folder)


def test_a_folder_as_it_was_written_is_taken_also_somewhere_else(folder: Path) -> None:
    check_files(folder)
    check_files(folder.rename(folder.with_name("other")))


def test_files_are_summed_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PIECE_BYTES", 3)
    assert checksum_of(folder / "trainer" / "a") == (10, f"{zlib.crc32(b'0123456789'):08x}")


@pytest.mark.parametrize("bit", range(80))
def test_every_bit_counts(folder: Path, bit: int) -> None:
    data = bytearray(b"0123456789")
    data[bit // 8] ^= 1 << bit % 8
    (folder / "trainer" / "a").write_bytes(data)
    refuse(folder, f"{folder / 'trainer' / 'a'} is damaged: its checksum is not that of the bytes")


def test_what_is_missing_short_or_too_much_is_named(folder: Path) -> None:
    path = folder / "trainer" / "a"
    path.write_bytes(b"0123")
    refuse(folder, f"{path} is damaged: it has 4 bytes and was written with 10")
    path.unlink()
    refuse(folder, f"{path} is missing")
    check_files(folder, below="b")
    (folder / "trainer" / "other").touch()
    with pytest.raises(UserError, match="trainer/other is not one of the files that were written"):
        check_files(folder, closed="trainer")
    (folder / "checksums.json").write_text('{"b": 3}')
    refuse(folder, "checksums.json is damaged: ")
    (folder / "checksums.json").unlink()
    refuse(folder, "checksums.json is missing")


def test_what_is_known_is_not_read_again(folder: Path) -> None:
    """The bytes in memory count, whatever the disk made of them."""
    write_checksums(folder, {folder / "trainer" / "a": (10, f"{zlib.crc32(b'0123456788'):08x}")})
    refuse(folder, "trainer/a is damaged")
