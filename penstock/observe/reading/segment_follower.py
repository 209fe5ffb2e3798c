"""Follows one kind of a run's event files: each call returns what was appended since the last."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.observe.events import Span
from penstock.observe.store.segments import (
    FORMAT,
    FRAMES,
    THINNED,
    Kind,
    SegmentHead,
    segment_path,
    segments_of,
    unpacked,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFrame:
    """Holds a frame's records; `offset_s` turns their times into Unix times."""

    turn: int
    first: int
    records: list[Any]
    offset_s: float
    session: int = 0


class SegmentFollower:
    """Reads new frames. Frames that a crash has cut are skipped, as are segments that were deleted to make room."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder, self._kind = folder, kind
        self._decoder: Any = msgspec.msgpack.Decoder(FRAMES[kind])
        self._segment = -1
        self._place = 0
        self._head: SegmentHead | None = None
        self._inode = 0
        self._next = 0
        """Number of the first record that was not read yet."""
        self.num_damaged = 0
        """Segments with an unreadable end although newer segments exist."""

    def read(self) -> list[ReadFrame]:
        frames: list[ReadFrame] = []
        there = [number for number in segments_of(self._folder, self._kind) if number >= self._segment]
        for index, number in enumerate(there):
            if number != self._segment:
                self._segment, self._place, self._head = number, 0, None
            rest = self._read_segment(frames)
            if rest and index + 1 < len(there):
                self.num_damaged += 1
        return frames

    def _read_segment(self, frames: list[ReadFrame]) -> int:
        """Append a segment's new frames to `frames`; return how many bytes at its end are no whole frame."""
        try:
            with segment_path(self._folder, self._kind, self._segment).open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:  # another segment, or this one was thinned meanwhile
                    self._inode, self._place, self._head = inode, 0, None
                file.seek(self._place)
                data = memoryview(file.read())
        except FileNotFoundError:  # deleted meanwhile to make room
            return 0
        start = 0
        if self._head is None:
            for end, payload in unpacked(data, "head"):
                self._head, start = checked_head(payload, self._folder), end
                break
        if self._head is not None:
            for end, payload in unpacked(data, self._kind, start):
                frame = self._decoder.decode(payload)
                start = end
                if self._kind in THINNED and frame.first < self._next:
                    continue  # read before its segment was thinned
                self._next = frame.first + len(frame.records)
                frames.append(
                    ReadFrame(
                        turn=frame.turn,
                        first=frame.first,
                        records=frame.records,
                        offset_s=self._head.offset_s,
                        session=self._head.session,
                    )
                )
        self._place += start
        return len(data) - start


def checked_head(payload: bytes, folder: Path) -> SegmentHead:
    head = msgspec.msgpack.decode(payload, type=SegmentHead)
    if head.format != FORMAT:
        raise UserError(
            f"{folder} has events of format {head.format}, and this version of penstock reads format {FORMAT}; "
            "read it with the version that wrote it"
        )
    return head


def shift(record: Any, seconds: float) -> None:
    """Move a record to another clock, in place: it was just read, so no other part holds it."""
    msgspec.structs.force_setattr(record, "time", record.time + seconds)
    if isinstance(record, Span):
        msgspec.structs.force_setattr(record, "start", record.start + seconds)
