"""An endless, deterministic order of tasks: pass after pass, each shuffled by the seed and its number."""

import random
from collections import deque
from collections.abc import Sequence

from penstock.errors import TaskError
from penstock.types import Task


class TaskStream:
    """What was put back comes first; then the current pass goes on."""

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, shuffle: bool = True) -> None:
        if not tasks:
            raise TaskError("there must be at least one task, got none")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._returned: deque[Task] = deque()
        self._pass = 0
        self._position = 0
        self._order = self._order_of(0)

    def next(self) -> Task:
        if self._returned:
            return self._returned.popleft()
        if self._position == len(self._tasks):
            self._pass += 1
            self._position = 0
            self._order = self._order_of(self._pass)
        self._position += 1
        return self._tasks[self._order[self._position - 1]]

    def put_back(self, task: Task) -> None:
        self._returned.append(task)

    def _order_of(self, number: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"{self._seed}/{number}").shuffle(order)
        return order
