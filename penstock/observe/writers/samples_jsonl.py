"""`samples.jsonl`: every sample that a run has kept, one a line, for other programs. An export of `RUN/events`."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.observe.events import SampleEvent, as_fields
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.store.segments import FOLDER
from penstock.safe_files import replace_private

NAME = "samples.jsonl"


def read_samples(folder: Path) -> Iterator[SampleEvent]:
    """What is kept of a run, oldest first, samples of undone steps included."""
    if not (folder / FOLDER).is_dir():
        return
    run = RunReading(folder)
    run.refresh()
    for row in range(len(run.samples)):
        yield run.samples.read(row)


def export_samples(folder: Path, path: Path) -> int:
    """Write them to a file, whole or not at all; how many there were."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for sample in read_samples(folder):
            count += 1
            yield encode_sample(sample)

    replace_private(path, lines())
    return count


def encode_sample(event: SampleEvent) -> bytes:
    """A line. Half of a surrogate pair, which UTF-8 has no bytes for, is escaped as JSON does."""
    fields = as_fields(event)
    try:
        return msgspec.json.encode(fields) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
