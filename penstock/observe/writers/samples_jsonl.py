"""`samples.jsonl`: every `SampleEvent` of a run, one a line, as `penstock.observe.events` describes it.

The file is bounded: when it is full it becomes `samples.old.jsonl`, in the place of the one before, and a new one
begins. So the newest samples are always there, and the two files together keep to the limit.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.observe.events import AnyEvent, Drop, SampleEvent, StepEvent
from penstock.safe_files import open_private

NEWEST, OLDER = "samples.jsonl", "samples.old.jsonl"


class SamplesWriter:
    """`penstock.observe.event_stream.Reader`. `max_bytes` is for both files together."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._path, self._older = folder / NEWEST, folder / OLDER
        self._limit = max_bytes // 2
        self._file = open_private(self._path, "ab")
        self._size = self._file.tell()
        if self._size and not _ends_a_line(self._path):  # a crash cut it, and the run goes on
            self._write(b"\n")

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SampleEvent):
            self._write(encode_sample(event))
        elif isinstance(event, StepEvent | Drop):  # comes after its samples
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._size and self._size + len(line) > self._limit:
            self._file.close()
            self._path.replace(self._older)
            self._file = open_private(self._path, "ab")
            self._size = 0
        self._file.write(line)
        self._size += len(line)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def encode_sample(event: SampleEvent) -> bytes:
    """A line. Half of a surrogate pair, which UTF-8 has no bytes for, is escaped as JSON does."""
    try:
        return msgspec.json.encode(event) + b"\n"
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(event), ensure_ascii=False)
        return text.encode("utf-8", "backslashreplace") + b"\n"


def read_samples(folder: Path) -> Iterator[SampleEvent]:
    """What is kept of a run, oldest first. A line that a crash has cut is passed over."""
    for name in (OLDER, NEWEST):
        path = folder / name
        if not path.exists():
            continue
        with path.open("rb") as lines:
            for line in lines:
                try:
                    yield msgspec.convert(json.loads(line), SampleEvent)
                except (ValueError, msgspec.ValidationError):
                    continue
