"""Brings recorded sampling masks from a device: kernels write into an arena, and the host reads parts of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.engines.embedded.cuda.kernels.sampling import MaskArena
from penstock.models.transfer import download
from penstock.records import IntArray, SamplingMask
from penstock.records.sampling_masks import NO_WORDS, Packed, shorten

SEGMENTS = 3
"""Parts of the arena: each launch in flight has its own, and so has the next one."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Locates the masks of one launch: (rows, steps) tables into a segment, valid once the launch's event has
    come."""

    sizes: torch.Tensor
    places: torch.Tensor
    end: torch.Tensor
    start: int


class MaskRoom:
    """Owns the arena that kept ids are written into, in segments that launches take in turn."""

    def __init__(self, rows: int, window: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._segment_words = rows * window * MaskArena.words_per_row(vocab)
        self._words = torch.empty(SEGMENTS * self._segment_words, dtype=torch.int32, device=device)
        self._cursor = torch.zeros(1, dtype=torch.int32, device=device)
        self._sizes = torch.zeros(rows, window, dtype=torch.int32, device=device)
        self._places = torch.zeros(rows, window, dtype=torch.int32, device=device)
        self._turn = 0
        self._side: Any = None

    def next_segment(self) -> int:
        """Return the offset from which the next launch writes, and set the cursor there."""
        self._turn = (self._turn + 1) % SEGMENTS
        start = self._turn * self._segment_words
        self._cursor.fill_(start)
        return start

    def arena(self, records: torch.Tensor, step: torch.Tensor) -> MaskArena:
        """Return the arena for a decode step, whose tables are at fixed addresses."""
        return MaskArena(records, step, self._words, self._cursor, self._sizes, self._places)

    def arena_of_one(self, records: torch.Tensor) -> MaskArena:
        """Return an arena for a single draw a row."""
        tables = torch.zeros(2, len(records), 1, dtype=torch.int32, device=records.device)
        step = torch.zeros(1, dtype=torch.int64, device=records.device)
        return MaskArena(records, step, self._words, self._cursor, tables[0], tables[1])

    def recorded(self, arena: MaskArena, rows: int, steps: int, segment: int) -> Recorded:
        """Send the tables of a launch to the host."""
        sizes, places = (table[:rows, :steps].contiguous() for table in (arena.sizes, arena.places))
        return Recorded(download(sizes), download(places), download(arena.cursor), segment)

    def read(self, recorded: Recorded) -> "MaskTable":
        """Return the masks that a launch has written. A stream of its own copies them, beside later launches."""
        sizes, places = recorded.sizes.numpy(), recorded.places.numpy()
        words = self._copy(self._words[recorded.start : int(recorded.end)])
        return MaskTable(sizes, places - recorded.start, words, self._vocab)

    def _copy(self, part: torch.Tensor) -> IntArray:
        if part.device.type == "cpu":
            copy: IntArray = part.numpy().copy()
            return copy
        if self._side is None:
            self._side = torch.cuda.Stream(part.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            words = download(part)
        self._side.synchronize()
        on_host: IntArray = words.numpy()
        return on_host


class MaskTable:
    """Puts the masks of one launch in order: row after row, and within a row step after step."""

    def __init__(self, sizes: IntArray, places: IntArray, words: IntArray, vocab: int) -> None:
        counts, holds_ids = np.abs(sizes), sizes >= 0
        most = SamplingMask.bitmask_words(vocab)
        lengths = np.where(holds_ids, counts, most).reshape(-1)
        before = np.cumsum(lengths, dtype=np.int64) - lengths
        ordered = words[np.repeat(places.reshape(-1) - before, lengths) + np.arange(lengths.sum())]
        self._words = shorten(counts.reshape(-1), ordered, holds_ids.reshape(-1), vocab)
        ends = np.cumsum(np.minimum(counts, most), dtype=np.int64)
        self._ends: Any = ends.reshape(counts.shape).tolist()
        self._counts: Any = counts.tolist()

    def packed(self, row: int, count: int) -> Packed:
        """Return the masks of the first `count` tokens of a row."""
        if count == 0:
            return Packed([], NO_WORDS)
        start = self._ends[row - 1][-1] if row else 0
        words = self._words[start : self._ends[row][count - 1]]
        return Packed(self._counts[row][:count], words.copy())  # a view would keep the whole launch in memory
