"""Reads a journal from its beginning, and repairs what a crash left at its end."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.durability.journal.frames import (
    HEADER_BYTES,
    Frame,
    JournalDamaged,
    follows_good_frame,
    frame,
    frames_of,
    has_header,
    header,
)
from penstock.durability.journal.journal_files import JournalFiles

BASE = "base.journal"
_NAME = re.compile(r"segment-(\d{8})\.journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEnd:
    """Says where the next frame is written, and what a crash left behind that position."""

    segment: int = 1
    size: int = 0
    """Bytes of the segment; 0 when it does not exist yet."""
    sequence: int = 0
    """The sequence number of the last frame."""
    torn_bytes: int = 0
    """Bytes behind it that a crash left half written."""


def segment_name(number: int) -> str:
    return f"segment-{number:08d}.journal"


def segments_of(files: JournalFiles) -> list[int]:
    return sorted(int(match[1]) for name in files.names() if (match := _NAME.fullmatch(name)))


def base_file(first: int, state: bytes) -> bytes:
    """Return the content of the file that replaces the segments before `first`."""
    return header() + frame(first, [state])


def read_base(files: JournalFiles) -> tuple[int, bytes | None]:
    """Return the first segment that counts, and what is known of those before it."""
    if BASE not in files.names():
        return 1, None
    data = files.read(BASE)
    found = next(frames_of(data), None) if has_header(BASE, data) else None
    if found is None:
        raise JournalDamaged(f"{BASE} of the journal can't be read: its checksum differs")
    return found.sequence, found.records[0]


def replay(files: JournalFiles, each: Callable[[bytes, int], None]) -> JournalEnd:
    """Pass every record to `each` with its segment, oldest first. Nothing is changed, since a run may still be
    writing."""
    first, _ = read_base(files)
    numbers = [number for number in segments_of(files) if number >= first]
    end = JournalEnd(segment=first)
    for number in numbers:
        end = _replay_segment(files, number, end, numbers, each)
    return end


def mend(files: JournalFiles, end: JournalEnd) -> None:
    """Cut the torn tail and sync what was read. Remove segments whose removal a crash prevented."""
    first, _ = read_base(files)
    for number in segments_of(files):
        if number < first:
            files.remove(segment_name(number))
    if end.torn_bytes or end.size:
        files.cut(segment_name(end.segment), end.size)
        files.sync(segment_name(end.segment))


def _replay_segment(
    files: JournalFiles,
    number: int,
    before: JournalEnd,
    numbers: list[int],
    each: Callable[[bytes, int], None],
) -> JournalEnd:
    name, is_last = segment_name(number), number == numbers[-1]
    if number != numbers[0] and number != before.segment + 1:
        raise JournalDamaged(f"{segment_name(before.segment + 1)} of the journal is missing")
    data = files.read(name)
    size, sequence = 0, before.sequence
    if has_header(name, data):
        size = HEADER_BYTES
        for found in frames_of(data):
            _check_order(name, found, sequence)
            for record in found.records:
                each(record, number)
            size, sequence = found.end, found.sequence
    if size < len(data) and (not is_last or follows_good_frame(data, size, sequence)):
        raise JournalDamaged(
            f"{name} is damaged at byte {size}: a checksum differs, and records behind it are whole, so this is "
            "no write that a crash cut off; restore the file from a copy, or remove the journal folder to continue "
            "from the last checkpoint alone"
        )
    if size == 0 and not is_last:
        raise JournalDamaged(f"{name} of the journal is empty, and a later segment is there")
    return JournalEnd(segment=number, size=size, sequence=sequence, torn_bytes=len(data) - size)


def _check_order(name: str, found: Frame, last: int) -> None:
    if last and found.sequence != last + 1:
        raise JournalDamaged(
            f"{name} continues with commit {found.sequence} after {last}: records are missing"
        )
