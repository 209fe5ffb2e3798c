"""Keeps every sample of a run as columns, to count, filter and find samples without their texts."""

from bisect import bisect_right
from collections.abc import Callable
from math import nan
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.observe.events import SampleEvent
from penstock.observe.reading.frame_index import FrameIndex, FrameLocation
from penstock.observe.store.segments import Texts

Rows = npt.NDArray[np.int64]
Range = tuple[float, float]
FLOATS = ("reward", "time")
COLUMNS = (
    *("number", "step", "group", "episode", "tokens", "age"),
    *("drop", "task", "failure", "finish", "traced", *FLOATS),
)


class Codes:
    """Numbers names in order of appearance; 0 stands for no name."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._codes = {"": 0}

    def __getitem__(self, name: str | None) -> int:
        name = name or ""
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self.names)
            self.names.append(name)
        return code

    def find(self, name: str) -> int:
        """Return the number of a name, or -1 if it is unknown."""
        return self._codes.get(name, -1)


class SampleTable:
    """Keeps one row for each sample, in the order of the event files. `texts` finds their texts."""

    def __init__(self, texts: FrameIndex) -> None:
        self._texts = texts
        self._events: list[SampleEvent] = []
        self._numbers: list[int] = []
        self._drop, self._task, self._failure, self._finish = Codes(), Codes(), Codes(), Codes()
        self._new: list[tuple[float, ...]] = []
        """New rows of `COLUMNS`, not yet added to the columns."""
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._undone: set[int] = set()
        self._of_step: dict[int, list[int]] = {}
        self._last_frame: tuple[FrameLocation, list[Texts], int] | None = None

    def __len__(self) -> int:
        return len(self._events)

    def add(self, number: int, event: SampleEvent) -> None:
        step = -1 if event.step is None else event.step
        self._new.append(
            (
                number,
                step,
                event.group,
                event.episode,
                event.num_output_tokens,
                -1 if event.age is None else event.age,
                self._drop[event.drop],
                self._task[event.task_id],
                self._failure[event.failure],
                self._finish[event.finish_reason],
                event.traced,
                nan if event.reward is None else event.reward,
                event.time,
            )
        )
        if step >= 0:
            self._of_step.setdefault(step, []).append(len(self._events))
        self._numbers.append(number)
        self._events.append(event)

    def undo(self, first_step: int) -> None:
        """Mark the samples of this step and later ones as undone: the steps are trained again."""
        for step in [step for step in self._of_step if step >= first_step]:
            self._undone.update(self._of_step.pop(step))

    @property
    def drop_names(self) -> list[str]:
        return self._drop.names

    @property
    def task_names(self) -> list[str]:
        return self._task.names

    @property
    def failure_names(self) -> list[str]:
        return self._failure.names

    @property
    def finish_names(self) -> list[str]:
        return self._finish.names

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return all columns by name, with a value for each row. `undone` marks samples of steps that were
        trained again later."""
        if self._new or not self._columns:
            table = np.array(self._new, dtype=np.float64).reshape(-1, len(COLUMNS))
            self._new.clear()
            for place, name in enumerate(COLUMNS):
                kind: Any = np.float64 if name in FLOATS else np.bool_ if name == "traced" else np.int64
                fresh, old = table[:, place].astype(kind), self._columns.get(name)
                self._columns[name] = fresh if old is None else np.concatenate([old, fresh])
        undone = np.zeros(len(self._events), dtype=np.bool_)
        undone[list(self._undone)] = True
        return {**self._columns, "undone": undone}

    def select(
        self,
        *,
        step: int | None = None,
        steps: Range | None = None,
        group: int | None = None,
        reward: Range | None = None,
        tokens: Range | None = None,
        age: Range | None = None,
        drop: str | None = None,
        task: str | None = None,
        undone: bool = False,
    ) -> Rows:
        """Return matching rows, oldest first. Ranges include both ends. `drop` is a reason, `any` or `none`;
        `undone` includes samples of steps that were trained again later."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        columns = self.columns
        keep = np.ones(len(self), dtype=np.bool_) if undone else ~columns["undone"]
        if step is not None:
            keep &= columns["step"] == step
        if group is not None:
            keep &= columns["group"] == group
        for name, limits in (("step", steps), ("reward", reward), ("tokens", tokens), ("age", age)):
            if limits is not None:
                keep &= (columns[name] >= limits[0]) & (columns[name] <= limits[1])
        if drop is not None:
            is_drop = columns["drop"] != 0
            keep &= (
                is_drop
                if drop == "any"
                else ~is_drop
                if drop == "none"
                else columns["drop"] == self._drop.find(drop)
            )
        if task is not None:
            keep &= columns["task"] == self._task.find(task)
        return np.flatnonzero(keep)

    def histogram(
        self, name: str, rows: Rows | None = None, bins: int = 30
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the edges and counts of a column's known values. Integer columns get bars of integer width."""
        column = self.columns[name]
        values = (column if rows is None else column[rows]).astype(np.float64)
        values = values[np.isfinite(values)]
        if not values.size:
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        low, high = float(values.min()), float(values.max())
        if name not in FLOATS:
            width = max(1, int(np.ceil((high - low + 1) / bins)))
            edges = np.arange(low, high + width + 1, width)
        else:
            edges = np.linspace(low, high if high > low else low + 1, bins + 1)
        counts, _ = np.histogram(values, edges)
        return edges.astype(np.float64), counts.astype(np.int64)

    def head(self, row: int) -> SampleEvent:
        """Return a sample without its texts."""
        return self._events[row]

    def read(self, row: int) -> SampleEvent:
        """Return a sample with its texts, if they are still kept."""
        event = self._events[row]
        texts = self._read_texts(self._numbers[row])
        if texts is None:
            return msgspec.structs.replace(event, text_kept=False)
        return msgspec.structs.replace(event, **texts)

    def _read_texts(self, number: int) -> dict[str, Any] | None:
        self._texts.refresh()
        places = self._texts.places
        index = bisect_right(places, number, key=_key) - 1
        if index < 0:
            return None
        place = places[index]
        if self._last_frame is None or self._last_frame[0] != place:
            frame = self._texts.read(place)
            if frame is None:
                return None
            self._last_frame = (place, frame.records, frame.first)
        _, records, first = self._last_frame
        at = number - first
        if not 0 <= at < len(records):
            return None
        prompt = next((one.prompt for one in reversed(records[: at + 1]) if one.prompt is not None), "")
        return {**msgspec.structs.asdict(records[at]), "prompt": prompt}


_key: Callable[[FrameLocation], int] = lambda place: place.key  # noqa: E731
