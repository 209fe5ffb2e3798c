"""What is copied to other machines, and what stays."""

from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.processes.launchers.node_calls import FilePiece
from penstock.processes.launchers.user_files import PIECE, gather


def write(path: Path, data: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_the_working_directory_goes_without_environments_caches_and_runs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("reward.py", "data/rows.jsonl", "runs/demo/model.bin", ".git/config", "env/pyvenv.cfg"):
        write(home / name)
    write(home / "env/lib.py")
    write(home / "__pycache__/reward.pyc")
    write(home / ".secret")
    files = gather(home, [], left_out=[home / "runs"], max_mb=1.0)
    assert [piece.path for piece in files.pieces()] == ["files/0/reward.py", "files/0/data/rows.jsonl"]
    assert files.places == ((str(home), "files/0"),)


def test_other_folders_go_too_unless_they_are_inside(tmp_path: Path) -> None:
    write(tmp_path / "home/a.py")
    write(tmp_path / "home/inner/b.py")
    write(tmp_path / "elsewhere/c.py")
    others = [tmp_path / "home/inner", tmp_path / "elsewhere", tmp_path / "missing"]
    files = gather(tmp_path / "home", others, max_mb=1.0)
    assert [place for _, place in files.places] == ["files/0", "files/1"]
    assert [piece.path for piece in files.pieces()][-1] == "files/1/c.py"


def test_large_files_travel_in_pieces_and_empty_ones_too(tmp_path: Path) -> None:
    write(tmp_path / "large.bin", b"a" * (PIECE + 1))
    write(tmp_path / "none.txt", b"")
    pieces = list(gather(tmp_path, [], max_mb=100.0).pieces())
    assert [len(piece.data) for piece in pieces] == [PIECE, 1, 0]
    assert pieces[-1] == FilePiece(path="files/0/none.txt", data=b"")


def test_small_files_travel_together_and_pieces_keep_their_order(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.py")
    write(tmp_path / "large.bin", b"a" * (PIECE + 1))
    write(tmp_path / "last.py")
    bundles = list(gather(tmp_path, [], max_mb=100.0).bundles())
    names = [
        [(piece.path.removeprefix("files/0/"), len(piece.data)) for piece in bundle] for bundle in bundles
    ]
    small = [("0.py", 1), ("1.py", 1), ("2.py", 1)]
    assert names == [small, [("large.bin", PIECE)], [("large.bin", 1), ("last.py", 1)]]
    assert list(gather(tmp_path / "none", [], max_mb=1.0).bundles()) == []


def test_too_much_is_refused_with_the_largest_folder(tmp_path: Path) -> None:
    write(tmp_path / "small.py")
    write(tmp_path / "weights/model.bin", b"0" * 3_000_000)
    message = (
        rf"at most launcher\.files_mb=2 MB, .* 3\.0 MB in {tmp_path}/weights; .* raise launcher\.files_mb"
    )
    with pytest.raises(UserError, match=message):
        gather(tmp_path, [], max_mb=2.0)
