"""Frames as they travel over a channel, for tests that speak to it byte by byte."""

from typing import Any

import msgspec


def framed(data: bytes) -> bytes:
    """Bytes behind their length."""
    return len(data).to_bytes(4, "big") + data


def frames_of(*messages: Any) -> bytes:
    """Messages, each in a frame of its own."""
    return b"".join(framed(msgspec.msgpack.encode(message)) for message in messages)
