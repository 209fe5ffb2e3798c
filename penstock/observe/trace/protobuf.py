"""As much of protobuf's wire format as a trace needs: fields by number, appended to bytes."""

import struct

_DOUBLE = struct.Struct("<d")
_FIXED = struct.Struct("<Q")


def varint(value: int) -> bytes:
    """Of an integer >= 0; a negative one as its two's complement in 64 bits."""
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
    """A string in UTF-8, or another message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    return data(field, value.encode("utf-8", "replace"))
