"""Reads protobuf's wire format, independently of what writes it."""

import struct
from collections.abc import Iterator
from typing import Any


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
            case 1:
                yield key >> 3, message[place : place + 8]
                place += 8
            case 2:
                length = varint()
                yield key >> 3, message[place : place + length]
                place += length
            case kind:
                raise AssertionError(f"wire type {kind}")
    assert place == len(message)


def table(message: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, value in fields(message):
        found.setdefault(number, []).append(value)
    return found


def events(trace: bytes) -> Iterator[tuple[int, dict[int, list[Any]]]]:
    """Times in nanoseconds, and the fields of every track event."""
    for number, packet in fields(trace):
        assert number == 1
        content = table(packet)
        assert content[10] == [1]
        if 11 in content:
            yield content[8][0], table(content[11][0])


def descriptors(trace: bytes) -> list[dict[int, list[Any]]]:
    packets = (table(packet) for _, packet in fields(trace))
    return [table(packet[60][0]) for packet in packets if 60 in packet]


def number(value: bytes) -> int:
    return int(struct.unpack("<Q", value)[0])
