"""Writes one kind of records into segments. When the budget is spent, old segments are deleted or thinned."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from penstock.observe.events import Span, TokensEvent
from penstock.observe.store.segment_thinning import thin_out
from penstock.observe.store.segments import (
    FRAMES,
    RECORDS_OF_A_FRAME,
    THINNED,
    Kind,
    SegmentHead,
    packed,
    segment_path,
    segments_of,
    span_key,
)
from penstock.observe.writers.buffered_lines import BufferedLines

SEGMENT_BYTES = 8 << 20
SEGMENTS_OF_A_BUDGET = 8
"""A budget is spent in at least this many segments, so that little is deleted at a time."""


class SegmentWriter:
    """Writes segments from `number` on; the first is made when there is something to write. `max_bytes` bounds
    all segments of the kind, those of earlier sessions included; None keeps all."""

    def __init__(
        self, folder: Path, head: SegmentHead, *, number: int, first: int, max_bytes: int | None
    ) -> None:
        self._folder = folder
        self._kind = cast(Kind, head.kind)
        self._head = packed(msgspec.msgpack.encode(head), "head")
        self._encoder = msgspec.msgpack.Encoder()
        self._number = number - 1
        self._next = first
        self._max_bytes = max_bytes
        limit = SEGMENT_BYTES if max_bytes is None else max_bytes // SEGMENTS_OF_A_BUDGET
        self._segment_bytes = min(SEGMENT_BYTES, limit)
        self._lines: BufferedLines | None = None
        self._size = 0
        for left in folder.glob(f"{self._kind}-*.seg.part"):  # left by a crash
            left.unlink()
        self._sizes = {
            there: segment_path(folder, self._kind, there).stat().st_size
            for there in segments_of(folder, self._kind)
        }

    def write(self, turn: int, records: Sequence[msgspec.Struct]) -> None:
        """Write records in as few frames as their kind allows. A full disk delays them."""
        size = RECORDS_OF_A_FRAME.get(self._kind, len(records))
        for start in range(0, len(records), size):
            self._write(turn, records[start : start + size])

    def _write(self, turn: int, records: Sequence[msgspec.Struct]) -> None:
        frame = FRAMES[self._kind](turn=turn, first=self._next, records=records)
        key = _key(records, self._next)
        self._next += len(records)
        data = packed(self._encode(frame), self._kind, key)
        if self._lines is None or (self._size and self._size + len(data) > self._segment_bytes):
            self._begin()
        assert self._lines is not None
        self._lines.add(data)
        self._size += len(data)
        self._lines.flush()
        self._sizes[self._number] = self._size
        if self._max_bytes is not None and sum(self._sizes.values()) > self._max_bytes:
            self._make_room(self._max_bytes)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _encode(self, frame: msgspec.Struct) -> bytes:
        try:
            return self._encoder.encode(frame)
        except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 has no bytes for
            return self._encoder.encode(_encodable(msgspec.to_builtins(frame, builtin_types=(bytes,))))

    def _begin(self) -> None:
        """Begin another segment, unless the disk is full: then the current one grows past its limit for a while."""
        if self._lines is not None:
            if not self._lines.are_written:
                return
            self._lines.close()
        self._number += 1
        self._lines = BufferedLines(segment_path(self._folder, self._kind, self._number))
        self._lines.add(self._head)
        self._size = len(self._head)

    def _make_room(self, budget: int) -> None:
        if self._kind in THINNED:
            with contextlib.suppress(OSError):  # no room to copy anything: delete the oldest instead
                self._thin(budget)
        self._drop_oldest(budget)

    def _thin(self, budget: int) -> None:
        """Thin what is older than the newest half. Free room for a whole segment, so that not every frame has to
        make room."""
        newest, old = 0, []
        for number in sorted(self._sizes, reverse=True):
            newest += self._sizes[number]
            if newest > budget // 2 and number != self._number:
                old.append(number)
        paths = {number: segment_path(self._folder, self._kind, number) for number in reversed(old)}
        taken = sum(self._sizes.values()) - sum(self._sizes[number] for number in old)
        thin_out(list(paths.values()), budget - taken - self._segment_bytes, self._segment_bytes)
        for number, path in paths.items():
            self._sizes[number] = path.stat().st_size if path.exists() else 0
        self._sizes = {number: size for number, size in self._sizes.items() if size}

    def _drop_oldest(self, budget: int) -> None:
        """Delete the oldest segments until the rest fits the budget. The segment being written stays."""
        while len(self._sizes) > 1 and sum(self._sizes.values()) > budget:
            oldest = min(self._sizes)
            segment_path(self._folder, self._kind, oldest).unlink(missing_ok=True)
            del self._sizes[oldest]


def _key(records: Sequence[msgspec.Struct], first: int) -> int:
    if isinstance(records[0], TokensEvent):
        return records[0].step
    spans = [record for record in records if isinstance(record, Span)]
    return span_key(spans) if spans else first


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return value
