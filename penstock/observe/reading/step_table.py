"""Keeps the metrics of every step as columns, for curves over tens of thousands of steps."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import unpack_from
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.observe.store.segments import StoredStep

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Axis = Literal["step", "time", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Merges neighbouring points of a curve."""

    x: float
    low: float
    high: float
    mean: float


class ColumnBlock:
    """Holds the steps that have the same columns; most steps share one block."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.rows = array("q")
        """Rows of the table that these steps have, ascending."""
        self._places = {name: place for place, name in enumerate(names)}
        self._values = bytearray()

    def add(self, row: int, values: bytes) -> None:
        self.rows.append(row)
        self._values += values

    def cut(self, size: int) -> None:
        """Remove the rows from `size` on."""
        while self.rows and self.rows[-1] >= size:
            self.rows.pop()
        del self._values[8 * len(self.names) * len(self.rows) :]

    def fill(self, column: Floats, name: str) -> None:
        """Write this block's values of the column `name` into `column`, which has a row for every step of the
        table."""
        place = self._places.get(name)
        if place is not None and self.rows:
            column[np.frombuffer(self.rows, np.int64)] = np.frombuffer(self._values, "<f8").reshape(
                len(self.rows), -1
            )[:, place]

    def row(self, row: int) -> dict[str, float]:
        size = 8 * len(self.names)
        start = size * bisect_left(self.rows, row)
        values = self._values[start : start + size]
        return dict(zip(self.names, np.frombuffer(values, "<f8").tolist(), strict=True))

    def values(self, row: int, names: Iterable[str]) -> dict[str, float]:
        start = 8 * len(self.names) * bisect_left(self.rows, row)
        places = ((name, self._places.get(name)) for name in names)
        return {
            name: unpack_from("<d", self._values, start + 8 * place)[0]
            for name, place in places
            if place is not None
        }


class StepTable:
    """Keeps the steps that were not undone, in order: a step that is trained again replaces its earlier row."""

    def __init__(self) -> None:
        self._steps: list[StoredStep] = []
        self._numbers, self._times = array("q"), array("d")
        self._block_of: list[ColumnBlock] = []
        """The block that holds each step."""
        self._by_names: dict[tuple[str, ...], ColumnBlock] = {}
        self._of_session: dict[int, ColumnBlock] = {}
        """Blocks by the number that the present session gave to their set of columns."""
        self.num_undone = 0

    def __len__(self) -> int:
        return len(self._steps)

    def begin_session(self) -> None:
        """Forget the column numbers of the last session: each session assigns its own."""
        self._of_session.clear()

    def add_columns(self, number: int, names: tuple[str, ...]) -> None:
        if names not in self._by_names:
            self._by_names[names] = ColumnBlock(names)
        self._of_session[number] = self._by_names[names]

    def add(self, step: StoredStep) -> None:
        if self._steps and self._steps[-1].step >= step.step:
            self._undo(step.step)
        block = self._of_session[step.columns]
        block.add(len(self._steps), step.values)
        self._block_of.append(block)
        msgspec.structs.force_setattr(step, "values", b"")  # the block has them
        self._steps.append(step)
        self._numbers.append(step.step)
        self._times.append(step.time)

    def _undo(self, first: int) -> None:
        while self._steps and self._steps[-1].step >= first:
            for each in (self._steps, self._block_of, self._numbers, self._times):
                each.pop()
            self.num_undone += 1
        for block in self._by_names.values():
            block.cut(len(self._steps))

    @property
    def last(self) -> StoredStep | None:
        return self._steps[-1] if self._steps else None

    @property
    def stored(self) -> Sequence[StoredStep]:
        """Return the steps without their metrics, which `column` and `row` return."""
        return self._steps

    @property
    def numbers(self) -> Ints:
        return np.array(self._numbers, dtype=np.int64)

    @property
    def times(self) -> Floats:
        """Return when each step ended."""
        return np.array(self._times, dtype=np.float64)

    @property
    def names(self) -> list[str]:
        """Return the names of all columns, in the order of the first step that has them."""
        return list(dict.fromkeys(name for names in self._by_names for name in names))

    def row(self, index: int) -> dict[str, float]:
        """Return a step's metrics, as its line in `metrics.jsonl` has them."""
        index = range(len(self._steps))[index]
        return self._block_of[index].row(index)

    def values(self, index: int, names: Iterable[str]) -> dict[str, float]:
        """Return the named metrics that the step has."""
        index = range(len(self._steps))[index]
        return self._block_of[index].values(index, names)

    def column(self, name: str) -> Floats:
        """Return a metric's value at each step; NaN where a step has none."""
        column = np.full(len(self._steps), np.nan)
        for block in self._by_names.values():
            block.fill(column, name)
        return column

    def axis(self, kind: Axis) -> Floats:
        match kind:
            case "step":
                return self.numbers.astype(np.float64)
            case "time":
                return self.times
            case "tokens":
                counts = np.array([step.num_samples for step in self._steps], dtype=np.float64)
                return np.cumsum(np.nan_to_num(self.column("answer_tokens_mean")) * counts)

    def thinned(self, name: str, x: Axis = "step", buckets: int = 500) -> list[Bucket]:
        """Return a curve in at most `buckets` pieces, with the extremes of each. Steps without a value are left
        out."""
        values, at = self.column(name), self.axis(x)
        known = np.isfinite(values)
        values, at = values[known], at[known]
        if not values.size:
            return []
        edges = np.unique(np.linspace(0, len(values), min(buckets, len(values)) + 1).astype(int))
        starts, sizes = edges[:-1], np.diff(edges)
        means = np.add.reduceat(values, starts) / sizes
        lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        middles = np.add.reduceat(at, starts) / sizes
        return [
            Bucket(x=float(middle), low=float(low), high=float(high), mean=float(mean))
            for middle, low, high, mean in zip(middles, lows, highs, means, strict=True)
        ]
