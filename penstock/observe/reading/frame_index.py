"""Finds single frames of a kind by their keys, without decoding the others."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.observe.reading.segment_follower import ReadFrame, checked_head
from penstock.observe.store.segments import (
    FRAMES,
    HEADER,
    Kind,
    SegmentHead,
    segment_path,
    segments_of,
    unpacked,
)


class FrameLocation(NamedTuple):
    key: int
    segment: int
    start: int
    size: int


class FrameIndex:
    """Knows where the frames of a kind are, by their keys. Only frame headers are parsed."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder, self._kind = folder, kind
        self._decoder: Any = msgspec.msgpack.Decoder(FRAMES[kind])
        self._inodes: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        """Offset up to which each segment was scanned."""
        self._newest = -1
        """Number of the newest segment, which may have grown since."""
        self._heads: dict[int, SegmentHead] = {}
        self.places: list[FrameLocation] = []
        """The frames found, oldest first."""

    def refresh(self) -> None:
        there = {number: self._look(number) for number in segments_of(self._folder, self._kind)}
        gone = {number for number, inode in self._inodes.items() if there.get(number) != inode}
        if gone:  # deleted to make room, or thinned
            self.places = [place for place in self.places if place.segment not in gone]
            self._ends = {number: end for number, end in self._ends.items() if number not in gone}
        self._inodes = {number: inode for number, inode in there.items() if inode}
        fresh = [number for number in self._inodes if number not in self._ends or number >= self._newest]
        is_in_order = not self.places or min(fresh, default=self._newest) >= self.places[-1].segment
        for number in fresh:
            self._scan(number)
        self._newest = max(self._inodes, default=self._newest)
        if not is_in_order:
            self.places.sort(key=lambda place: (place.segment, place.start))

    def _look(self, number: int) -> int:
        """Return the segment's inode: 0 if the file is gone, negative if it has become shorter."""
        try:
            found = segment_path(self._folder, self._kind, number).stat()
        except FileNotFoundError:
            return 0
        return found.st_ino if found.st_size >= self._ends.get(number, 0) else -found.st_ino

    def read(self, place: FrameLocation) -> ReadFrame | None:
        """Read one frame; None if its segment was deleted meanwhile, or it is damaged."""
        try:
            with segment_path(self._folder, self._kind, place.segment).open("rb") as file:
                file.seek(place.start)
                data = file.read(place.size)
        except FileNotFoundError:
            return None
        for _, payload in unpacked(data, self._kind):
            frame = self._decoder.decode(payload)
            offset_s = self.offset_s(place)
            return ReadFrame(turn=frame.turn, first=frame.first, records=frame.records, offset_s=offset_s)
        return None

    def offset_s(self, place: FrameLocation) -> float:
        """Return the seconds that turn the frame's event times into Unix times."""
        return self._heads[place.segment].offset_s

    def _scan(self, number: int) -> None:
        start = self._ends.get(number, 0)
        try:
            with segment_path(self._folder, self._kind, number).open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return
        at, size = 0, len(data)
        while at + HEADER.size <= size:
            length, _, key = HEADER.unpack_from(data, at)
            end = at + HEADER.size + length
            if end > size:
                break
            if start + at == 0:
                self._heads[number] = checked_head(data[at + HEADER.size : end], self._folder)
            else:
                self.places.append(FrameLocation(key, number, start + at, end - at))
            at = end
        self._ends[number] = start + at
