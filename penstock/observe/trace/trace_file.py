"""Writes Perfetto's TrackEvent packets: processes, tracks, slices, counters and arrows.

Field numbers are those of perfetto/trace/trace_packet.proto, track_event.proto and track_descriptor.proto.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import IO

_DOUBLE = struct.Struct("<d")
_FIXED = struct.Struct("<Q")


def varint(value: int) -> bytes:
    """Encode an integer; a negative one as its two's complement in 64 bits."""
    if value < 0:
        value += 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | 1) + _FIXED.pack(value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + _DOUBLE.pack(value)


def data(field: int, value: bytes) -> bytes:
    """Encode a field that holds a UTF-8 string or another message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    return data(field, value.encode("utf-8", "replace"))


SEQUENCE = integer(10, 1)
"""`trusted_packet_sequence_id` of the only writer."""
BEGIN, END, COUNTER = 1, 2, 4
"""`TrackEvent.Type`"""
FLUSH_BYTES = 1 << 20

Value = int | float | str


class TraceFile:
    """Writes a trace. Times are seconds >= 0; each track is written in time order, its slices properly nested."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._buffer = bytearray()
        self._num_tracks = 0
        self.num_slices = 0
        self.num_flows = 0
        """Arrows that were begun."""

    def process(self, name: str) -> int:
        """Begin a process, which groups tracks, and return its number."""
        self._num_tracks += 1
        track, pid = self._num_tracks, self._num_tracks
        self._describe(integer(1, track) + data(3, integer(1, pid) + text(6, name)))
        return track

    def track(self, process: int, name: str) -> int:
        self._num_tracks += 1
        self._describe(integer(1, self._num_tracks) + integer(5, process) + text(2, name))
        return self._num_tracks

    def counter_track(self, process: int, name: str) -> int:
        self._num_tracks += 1
        self._describe(integer(1, self._num_tracks) + integer(5, process) + text(2, name) + data(8, b""))
        return self._num_tracks

    def begin(
        self,
        track: int,
        time: float,
        name: str,
        values: Mapping[str, Value],
        *,
        flows: Sequence[int] = (),
        ends: Sequence[int] = (),
    ) -> None:
        """Begin a slice. `flows` are the arrows that leave it, `ends` those that arrive."""
        self.num_slices += 1
        self.num_flows += len(flows)
        event = integer(9, BEGIN) + integer(11, track) + text(23, name)
        event += b"".join(data(4, _annotation(key, value)) for key, value in values.items())
        event += b"".join(fixed64(47, flow) for flow in flows)
        event += b"".join(fixed64(48, flow) for flow in ends)
        self._packet(time, event)

    def end(self, track: int, time: float) -> None:
        self._packet(time, integer(9, END) + integer(11, track))

    def count(self, track: int, time: float, value: float) -> None:
        self._packet(time, integer(9, COUNTER) + integer(11, track) + double(44, value))

    def flush(self) -> None:
        self._file.write(self._buffer)
        self._buffer.clear()

    def _packet(self, time: float, event: bytes) -> None:
        self._add(integer(8, nanoseconds(time)) + SEQUENCE + data(11, event))

    def _describe(self, descriptor: bytes) -> None:
        self._add(SEQUENCE + data(60, descriptor))

    def _add(self, packet: bytes) -> None:
        self._buffer += data(1, packet)
        if len(self._buffer) > FLUSH_BYTES:
            self.flush()


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _annotation(name: str, value: Value) -> bytes:
    if isinstance(value, str):
        return text(10, name) + text(6, value)
    if isinstance(value, int):
        return text(10, name) + integer(4, value)
    return text(10, name) + double(5, value)
