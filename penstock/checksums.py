"""Writes and checks the checksums of a folder's files, so that a damaged checkpoint or model is found before it is
loaded.

    FOLDER/checksums.json    {"trainer/state.json": [number of bytes, "CRC-32"], …}

The journal's frames use the same checksum. Tensors are summed while they are written, from the bytes in memory.
"""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from penstock.errors import UserError

CHECKSUMS = "checksums.json"
PIECE_BYTES = 16 << 20
THREADS = 4
"""Threads that read files: zlib sums about 3 GB/s on one core, and releases Python's lock."""

Checksum = tuple[int, str]
"""The number of bytes, and their CRC-32 in eight hexadecimal digits."""


def checksum_of(path: Path) -> Checksum:
    num_bytes = crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            num_bytes += len(piece)
            crc = zlib.crc32(piece, crc)
    return num_bytes, f"{crc:08x}"


def write_checksums(folder: Path, known: Mapping[Path, Checksum] | None = None) -> None:
    """Write the checksums of all files in the folder. Files in `known` are not read again."""
    found = dict(known or {})
    for path in folder.rglob("*"):
        if path.is_file() and path not in found and path != folder / CHECKSUMS:
            found[path] = checksum_of(path)
    named = {path.relative_to(folder).as_posix(): found[path] for path in sorted(found)}
    (folder / CHECKSUMS).write_bytes(msgspec.json.encode(named))


def check_files(folder: Path, *, below: str = "", closed: str | None = None) -> None:
    """Refuse a folder with a file that differs from what was written; only files whose path begins with `below`
    are checked. The folder `closed` must hold no other files."""
    named = {name: known for name, known in _read(folder).items() if name.startswith(below)}
    paths = [folder / name for name in named]
    if closed is not None:
        for path in (folder / closed).rglob("[!.]*"):
            if path.is_file() and path not in paths:
                raise UserError(f"{path} is not one of the files that were written with {folder}")
    for path, (num_bytes, _) in zip(paths, named.values(), strict=True):
        if not path.is_file():
            raise UserError(f"{path} is missing")
        if path.stat().st_size != num_bytes:
            raise UserError(
                f"{path} is damaged: it has {path.stat().st_size:,} bytes and was written with {num_bytes:,}"
            )
    with ThreadPoolExecutor(THREADS) as threads:
        for path, found, known in zip(
            paths, threads.map(_checksum_or_error, paths), named.values(), strict=True
        ):
            if isinstance(found, OSError):
                raise UserError(f"{path} can't be read: {found}") from found
            if found != known:
                raise UserError(f"{path} is damaged: its checksum is not that of the bytes that were written")


def _read(folder: Path) -> dict[str, Checksum]:
    path = folder / CHECKSUMS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Checksum])
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing, and nothing else says whether {folder} is whole") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _checksum_or_error(path: Path) -> Checksum | OSError:
    try:
        return checksum_of(path)
    except OSError as error:
        return error
