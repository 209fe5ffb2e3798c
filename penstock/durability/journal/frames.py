"""Encodes segments as bytes: a header with the format's number, then frames. Each frame is one commit.

A frame is written only after the one before it is on the disk. So after a crash at most the last frame can be
torn. A bad frame with a good one behind it is other damage: that is an error, and is never cut.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import UserError

FORMAT = 2
"""The format of journals. Other numbers are refused."""
_MAGIC = b"penstock journal"
_HEADER = struct.Struct("<16sI")
_MARK = b"\xf5PnS"
_FRAME = struct.Struct("<4sQII")
HEADER_BYTES = _HEADER.size


class JournalDamaged(UserError):
    """The journal has lost records that were on the disk, or has an unknown format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Holds records that became durable together. Sequence numbers have no gap, over all segments."""

    sequence: int
    records: tuple[bytes, ...]
    end: int
    """The offset in its segment where it ends."""


def header() -> bytes:
    return _HEADER.pack(_MAGIC, FORMAT)


def frame(sequence: int, records: Sequence[bytes]) -> bytes:
    payload = msgspec.msgpack.encode(list(records))
    return _FRAME.pack(_MARK, sequence, len(payload), _checksum(sequence, payload)) + payload


def has_header(name: str, data: bytes) -> bool:
    """Return whether the data has a header, which a crash may have cut off. Another format is refused."""
    if len(data) < HEADER_BYTES:
        return False
    magic, number = _HEADER.unpack_from(data)
    if magic != _MAGIC or number == 0:  # zeros: the file grew, and its bytes never came
        return False
    if number != FORMAT:
        raise JournalDamaged(
            f"{name} has format {number}, and this Penstock reads format {FORMAT}; use the version of Penstock "
            "that wrote it"
        )
    return True


def frames_of(data: bytes) -> Iterator[Frame]:
    """Yield the good frames up to the first bad one."""
    position = HEADER_BYTES
    while (found := _frame_at(data, position)) is not None:
        yield found
        position = found.end


def follows_good_frame(data: bytes, start: int, sequence: int) -> bool:
    """Return whether an intact frame later than `sequence` follows `start`: then the bad bytes there are damage,
    not a write that a crash cut off."""
    position = data.find(_MARK, start)
    while position >= 0:
        found = _frame_at(data, position)
        if found is not None and found.sequence > sequence:
            return True
        position = data.find(_MARK, position + 1)
    return False


def _frame_at(data: bytes, position: int) -> Frame | None:
    start = position + _FRAME.size
    if start > len(data):
        return None
    mark, sequence, length, checksum = _FRAME.unpack_from(data, position)
    payload = data[start : start + length]
    if mark != _MARK or len(payload) < length or _checksum(sequence, payload) != checksum:
        return None
    records = tuple(msgspec.msgpack.decode(payload, type=list[bytes]))
    return Frame(sequence=sequence, records=records, end=start + length)


def _checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(sequence.to_bytes(8, "little")))
