"""Defines the files of `RUN/events`: segments of frames, each readable by itself.

    facts-000000.seg   steps, drops, updates, evaluations, lines, configs   kept for good
    counters-…         numbers of every process, twice a second             the newest within a budget
    spans-…            pieces of work and waits                             the same
    samples-…          every answer without its texts                       within a budget the newest half whole,
    texts-…            their texts                                          and of what is older an even share
    tokens-…           tokens of a few answers a step, as columns           (`segment_thinning`)

A frame is its length and its CRC-32 (4 bytes each), a key (8 bytes), all little-endian, then a msgpack array.
Frames are only appended, so a reader sees whole frames while the run writes, and a crash costs half a second
of events. Thinning replaces a file by a new one of the same name with fewer frames. A session never appends to
a file of an earlier one, so a frame that a crash has cut is always at a file's end. All kinds but facts are
compressed (zlib). The keys of texts (the number of the first), of tokens (the step) and of spans (their
times) let a reader find a frame without reading the others.
"""

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from penstock.observe.events import (
    CheckpointEvent,
    ConfigEvent,
    Counters,
    Doing,
    Drop,
    EvaluationEvent,
    Event,
    LogLine,
    PhaseEvent,
    RecoveryEvent,
    RunEvent,
    SampleEvent,
    Span,
    StalenessEvent,
    TokensEvent,
    TokenTexts,
    TurnText,
    UpdateEvent,
)

FOLDER = "events"
FORMAT = 1
Kind = Literal["facts", "counters", "spans", "samples", "texts", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPRESSED = ("counters", "spans", "samples", "texts", "tokens")
HEADER = struct.Struct("<IIQ")
_MAX_HUNDREDTHS = (1 << 32) - 1
MAX_FRAME = 1 << 28
"""Bytes; a longer frame is damaged."""
NAME = re.compile(rf"({'|'.join(KINDS)})-(\d{{6,}})\.seg")
RECORDS_OF_A_FRAME: dict[Kind, int] = {"samples": 64, "texts": 64, "tokens": 1}
"""Most records in a frame, for kinds whose records are read or deleted one frame at a time."""
THINNED: tuple[Kind, ...] = ("samples", "texts", "tokens")
"""Kinds of which every part of a run keeps a share. Of counters and spans only the newest stay."""


class SegmentHead(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Describes a segment in its first frame."""

    format: int
    kind: str
    session: int
    """How many sessions the run had before; a resumed run has several."""
    offset_s: float
    """Add this to an event time to get a Unix time."""
    began_s: float = 0.0
    """When the session began, in Unix time."""
    thinned: int = 0
    """How many times every second frame was dropped to make room."""


class StepColumns(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Names the values of the later steps that refer to its `number`."""

    number: int
    names: tuple[str, ...]


class StoredStep(Event, frozen=True, kw_only=True, array_like=True):
    """Stores a `StepEvent` whose metrics are the whole row of `metrics.jsonl`, as values of `StepColumns`:
    little-endian float64."""

    step: int
    reward: float
    num_samples: int
    columns: int
    values: bytes
    seconds: dict[str, float]
    waited_s: float
    took_s: float
    max_staleness: int
    groups: tuple[int, ...]
    waits: dict[str, float]
    own_metrics: tuple[str, ...]


class Texts(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Holds the texts of the sample with the same number."""

    prompt: str | None
    """None: the same as that of the sample before it in the frame."""
    answer: str
    message: str
    turns: tuple[TurnText, ...] = ()
    extra: dict[str, str] = {}


Fact = (
    RunEvent
    | ConfigEvent
    | PhaseEvent
    | Drop
    | StepColumns
    | StoredStep
    | StalenessEvent
    | UpdateEvent
    | EvaluationEvent
    | CheckpointEvent
    | RecoveryEvent
    | TokenTexts
    | LogLine
)


class Frame(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Holds records that were written at once."""

    turn: int
    """Grows with every flush; frames of several kinds that were written together have the same turn."""
    first: int
    """Number of the first record. Numbers of a kind rise over the whole run, with gaps between sessions."""


class FactFrame(Frame, frozen=True, kw_only=True, array_like=True):
    records: list[Fact]


class CounterFrame(Frame, frozen=True, kw_only=True, array_like=True):
    records: list[Counters | Doing]


class SpanFrame(Frame, frozen=True, kw_only=True, array_like=True):
    records: list[Span]


class SampleFrame(Frame, frozen=True, kw_only=True, array_like=True):
    records: list[SampleEvent]


class TextFrame(Frame, frozen=True, kw_only=True, array_like=True):
    records: list[Texts]


class TokenFrame(Frame, frozen=True, kw_only=True, array_like=True):
    records: list[TokensEvent]


AnyFrame = FactFrame | CounterFrame | SpanFrame | SampleFrame | TextFrame | TokenFrame
FRAMES: dict[Kind, type] = {
    "facts": FactFrame,
    "counters": CounterFrame,
    "spans": SpanFrame,
    "samples": SampleFrame,
    "texts": TextFrame,
    "tokens": TokenFrame,
}


def segment_path(folder: Path, kind: Kind, number: int) -> Path:
    return folder / f"{kind}-{number:06d}.seg"


def segments_of(folder: Path, kind: Kind) -> list[int]:
    """Return the numbers of the segments in a folder, oldest first."""
    names = (NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[2]) for name in names if name is not None and name[1] == kind)


def span_key(spans: Sequence[Span]) -> int:
    """Pack the start of the first span and the end of the last into one key, in hundredths of a second."""
    first, last = min(span.start for span in spans), max(span.time for span in spans)
    return _hundredths(first) << 32 | min(_hundredths(last) + 1, _MAX_HUNDREDTHS)


def key_times(key: int) -> tuple[float, float]:
    """Return the time range of a key of spans, rounded outwards."""
    return (key >> 32) / 100, (key & _MAX_HUNDREDTHS) / 100


def _hundredths(seconds: float) -> int:
    return min(_MAX_HUNDREDTHS, max(0, int(seconds * 100)))


def packed(payload: bytes, kind: str, key: int = 0) -> bytes:
    """Return a frame's bytes: the header, then the payload, which is compressed in most kinds."""
    if kind in COMPRESSED:
        payload = zlib.compress(payload, 1)
    return HEADER.pack(len(payload), zlib.crc32(payload), key) + payload


def unpacked(data: bytes | memoryview, kind: str, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield every whole frame from `start` on as (end, payload), and stop at a damaged one."""
    size = len(data)
    while start + HEADER.size <= size:
        length, checksum, _ = HEADER.unpack_from(data, start)
        end = start + HEADER.size + length
        if end > size or length > MAX_FRAME:
            return
        payload = bytes(data[start + HEADER.size : end])
        if zlib.crc32(payload) != checksum:
            return
        yield end, zlib.decompress(payload) if kind in COMPRESSED else payload
        start = end
