"""Recorded sampling masks on their way from a device: an arena that kernels write into, and what the host reads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.outbox import NOTHING_CUT, Ids
from penstock.models.kernels.sampling import WORD, MaskArena
from penstock.transfer import download

SEGMENTS = 3
"""Parts of the arena: each launch in flight has its own, and the next takes another."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The masks of one launch, there once its event has come: (rows, steps) tables into a segment."""

    sizes: torch.Tensor
    places: torch.Tensor
    end: torch.Tensor
    start: int


class MaskRoom:
    """The arena that kept ids are written into, in segments that launches take in turn."""

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
        """Where the next launch writes from; its cursor is set."""
        self._turn = (self._turn + 1) % SEGMENTS
        start = self._turn * self._segment_words
        self._cursor.fill_(start)
        return start

    def arena(self, records: torch.Tensor, step: torch.Tensor) -> MaskArena:
        """For a decode step, whose tables are at fixed addresses."""
        return MaskArena(records, step, self._words, self._cursor, self._sizes, self._places)

    def arena_of_one(self, records: torch.Tensor) -> MaskArena:
        """For a single draw a row."""
        tables = torch.zeros(2, len(records), 1, dtype=torch.int32, device=records.device)
        step = torch.zeros(1, dtype=torch.int64, device=records.device)
        return MaskArena(records, step, self._words, self._cursor, tables[0], tables[1])

    def recorded(self, arena: MaskArena, rows: int, steps: int, segment: int) -> Recorded:
        """Send the tables of a launch to the host."""
        sizes, places = (table[:rows, :steps].contiguous() for table in (arena.sizes, arena.places))
        return Recorded(download(sizes), download(places), download(arena.cursor), segment)

    def read(self, recorded: Recorded) -> npt.NDArray[np.int32]:
        """The used part of a launch's segment, copied beside the work that is queued behind."""
        part = self._words[recorded.start : int(recorded.end)]
        if part.device.type == "cpu":
            copy: npt.NDArray[np.int32] = part.numpy().copy()
            return copy
        if self._side is None:
            self._side = torch.cuda.Stream(part.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            words = download(part)
        self._side.synchronize()
        on_host: npt.NDArray[np.int32] = words.numpy()
        return on_host

    def kept(self, recorded: Recorded, words: npt.NDArray[np.int32], row: int, count: int) -> list[Ids]:
        """The kept ids of the first `count` tokens of a row, ascending; none where nothing was cut."""
        sizes, places = (table[row, :count].tolist() for table in (recorded.sizes, recorded.places))
        return [
            self._ids(words[place - recorded.start :], size)
            for size, place in zip(sizes, places, strict=True)
        ]

    def _ids(self, words: npt.NDArray[np.int32], size: int) -> Ids:
        if size == 0:
            return NOTHING_CUT
        if size > 0:
            return np.sort(words[:size])
        bits = words[: -(-self._vocab // WORD)].view(np.uint8)
        flags = np.unpackbits(bits, bitorder="little")[: self._vocab]
        return np.flatnonzero(flags).astype(np.int32)
