"""Gives an endless stream of tasks, epoch after epoch, shuffled by the seed."""

import random
import zlib
from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.errors import TaskError
from penstock.records import Record, Task
from penstock.tasks.curriculum import Curriculum


class StreamState(Record, frozen=True, kw_only=True):
    """Holds a stream's position as plain data, enough to continue it in another process."""

    epoch: int
    position: int
    returned: tuple[str, ...]
    """Ids of tasks that were put back and not taken again yet."""
    checksum: int
    """Checksum of the task ids, since a state belongs to one set of tasks."""
    rewards: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    """The rewards that the curriculum has seen, by kind of task."""


class TaskStream:
    """Gives tasks without end by `next()`. Tasks that were put back, because their group was dropped, come
    first."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Start the first epoch. Tasks that `curriculum` does not admit yet are skipped until the next epoch. If
        it admits none in a whole pass, one is used all the same."""
        if not tasks:
            raise TaskError("there must be at least one task, got none")
        self._tasks = tuple(tasks)
        self._by_id = {task.id: task for task in self._tasks}
        self._checksum = zlib.crc32("\n".join(task.id for task in self._tasks).encode())
        self._seed = seed
        self._shuffle = shuffle
        self.curriculum = curriculum
        self._returned: deque[Task] = deque()
        self._start_epoch(0, 0)

    @property
    def epoch(self) -> int:
        """Return the number of the current pass over the tasks, from 0."""
        return self._epoch

    @property
    def num_taken(self) -> int:
        """Return how many new tasks were taken, or skipped by the curriculum; one that was put back and taken
        again counts once."""
        return self._epoch * len(self._tasks) + self._position

    def task(self, task_id: str) -> Task:
        return self._by_id[task_id]

    def move_to(self, num_taken: int, returned: Sequence[str]) -> None:
        """Continue after `num_taken` new tasks, with the tasks `returned` put back."""
        epoch, position = divmod(num_taken, len(self._tasks))
        self._start_epoch(epoch, position)
        self._returned = deque(self._by_id[task_id] for task_id in returned)

    def next(self) -> Task:
        if self._returned:
            return self._returned.popleft()
        task = self._draw()
        for _ in range(len(self._tasks) - 1):  # after a whole pass no other task is left to try
            if self.curriculum is None or self.curriculum.admits(task):
                break
            task = self._draw()
        return task

    def _draw(self) -> Task:
        if self._position == len(self._tasks):
            self._start_epoch(self._epoch + 1, 0)
        task = self._tasks[self._order[self._position]]
        self._position += 1
        return task

    def put_back(self, task: Task) -> None:
        """Let `task` be taken again: before any new task, and after those put back earlier."""
        if task.id not in self._by_id:
            raise ValueError(f"task {task.id!r} is not of this stream")
        self._returned.append(task)

    def state(self) -> StreamState:
        return StreamState(
            epoch=self._epoch,
            position=self._position,
            returned=tuple(task.id for task in self._returned),
            checksum=self._checksum,
            rewards={} if self.curriculum is None else self.curriculum.rewards(),
        )

    def restore(self, state: StreamState) -> None:
        """Continue from `state`, or refuse when the tasks are not the same."""
        if state.checksum != self._checksum:
            raise TaskError(
                "the saved place in the tasks belongs to other tasks than the config gives now; "
                "resume with the tasks that the run was started with"
            )
        self._start_epoch(state.epoch, state.position)
        self._returned = deque(self._by_id[task_id] for task_id in state.returned)
        if self.curriculum is not None:
            self.curriculum.restore(state.rewards)

    def _start_epoch(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = list(range(len(self._tasks)))
        if self._shuffle:
            # A text seed is hashed with SHA-512, so the order is the same in every process and on every platform.
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
