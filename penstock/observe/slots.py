"""Assigns tracks to concurrent work: spans of one track must not overlap, so each takes the lowest free slot."""

import heapq


class Slots:
    def __init__(self) -> None:
        self._free: list[int] = []
        self._num = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._num += 1
        return self._num - 1

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
