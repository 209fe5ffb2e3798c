"""Counts the sessions that a run had, from its event files."""

from pathlib import Path

import msgspec

from penstock.observe.store.segments import HEADER, SegmentHead, segment_path, segments_of, unpacked

HEAD_BYTES = 4096
"""Bytes to read for a segment's first frame, which is shorter."""


def next_session(folder: Path) -> int:
    """Return the number of a new session: 0, or one after the newest that has written facts."""
    for number in reversed(segments_of(folder, "facts")):
        head = read_head(segment_path(folder, "facts", number))
        if head is not None:
            return head.session + 1
    return 0


def read_head(path: Path) -> SegmentHead | None:
    """Read a segment's head; None if it is not written yet, or the file was deleted meanwhile."""
    try:
        with path.open("rb") as file:
            data = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return None
    if len(data) < HEADER.size:
        return None
    for _, payload in unpacked(data, "head"):
        return msgspec.msgpack.decode(payload, type=SegmentHead)
    return None
