"""Collects the counters of every process over time, as arrays."""

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.observe.events import Counters


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    times: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]


class CounterSeries:
    def __init__(self) -> None:
        self._points: dict[str, dict[str, tuple[array[float], array[float]]]] = {}

    def add(self, event: Counters) -> None:
        of_process = self._points.setdefault(event.process, {})
        for name, value in event.values.items():
            if name not in of_process:
                of_process[name] = (array("d"), array("d"))
            times, values = of_process[name]
            times.append(event.time)
            values.append(value)

    @property
    def processes(self) -> list[str]:
        return list(self._points)

    def of(self, process: str) -> dict[str, Series]:
        return {
            name: Series(np.array(times), np.array(values))
            for name, (times, values) in self._points.get(process, {}).items()
        }
