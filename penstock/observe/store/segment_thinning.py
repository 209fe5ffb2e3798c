"""Makes room by thinning old samples, so that every part of a run keeps some.

    budget   [ every 2ⁿth frame of all that is older ][ the newest half, whole ]

When the budget is spent, segments that have left the newest half are thinned to the level of the old ones and
joined with them. When that is not enough, the level rises: every second frame of all old ones is dropped.
Frames are copied as they are, so this costs about as much as moving their bytes.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.observe.store.segments import HEADER, MAX_FRAME, SegmentHead, packed

MAX_LEVEL = 40
"""After so many halvings hardly a frame is left: the budget is too small for thinning."""


@dataclass(frozen=True, slots=True)
class WholeSegment:
    """Holds a segment in memory: its head, and its frames in their written form."""

    head: SegmentHead
    frames: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return len(_packed_head(self.head)) + sum(map(len, self.frames))

    def thinned(self, level: int) -> "WholeSegment":
        """Keep every 2ⁿth frame, beginning with the first, to raise the segment by n levels to `level`."""
        if level == self.head.thinned:
            return self
        every = 1 << (level - self.head.thinned)
        return WholeSegment(msgspec.structs.replace(self.head, thinned=level), self.frames[::every])

    def joined(self, later: "WholeSegment") -> "WholeSegment":
        return WholeSegment(self.head, self.frames + later.frames)


def read_segment(path: Path) -> WholeSegment | None:
    """Read a segment without an incomplete frame at its end; None if it has no whole head."""
    data = path.read_bytes()
    found, at = [], 0
    while at + HEADER.size <= len(data):
        length, _, _ = HEADER.unpack_from(data, at)
        end = at + HEADER.size + length
        if end > len(data) or length > MAX_FRAME:
            break
        found.append(data[at:end])
        at = end
    if not found:
        return None
    head = msgspec.msgpack.decode(found[0][HEADER.size :], type=SegmentHead)
    return WholeSegment(head, tuple(found[1:]))


def write_segment(path: Path, segment: WholeSegment) -> None:
    """Replace a segment atomically: a reader finds the old one or the new one, whole."""
    part = path.with_name(path.name + ".part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(_packed_head(segment.head))
            out.writelines(segment.frames)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def thin_out(paths: Sequence[Path], room: int, segment_bytes: int) -> None:
    """Thin these segments, given oldest first, until they take at most `room` bytes, and join neighbours up to
    `segment_bytes`. If `MAX_LEVEL` halvings do not suffice, all are deleted."""
    there = [(path, segment) for path in paths if (segment := read_segment(path)) is not None]
    before = dict(there)
    level = max((segment.head.thinned for _, segment in there), default=0)
    while there:
        there = _joined([(path, segment.thinned(level)) for path, segment in there], segment_bytes)
        if sum(segment.num_bytes for _, segment in there) <= room:
            break
        level += 1
        if level > MAX_LEVEL:
            there = []
    kept = dict(there)
    for path, segment in there:
        if segment != before[path]:
            write_segment(path, segment)
    for path in paths:
        if path not in kept:
            path.unlink(missing_ok=True)


def _joined(segments: Sequence[tuple[Path, WholeSegment]], limit: int) -> list[tuple[Path, WholeSegment]]:
    """Join neighbouring segments of one session into as few as the limit allows."""
    made: list[tuple[Path, WholeSegment]] = []
    for path, segment in segments:
        before = made[-1][1] if made else None
        if (
            before is not None
            and before.head.session == segment.head.session
            and before.num_bytes + segment.num_bytes <= limit
        ):
            made[-1] = (made[-1][0], before.joined(segment))
        else:
            made.append((path, segment))
    return made


def _packed_head(head: SegmentHead) -> bytes:
    return packed(msgspec.msgpack.encode(head), "head")
