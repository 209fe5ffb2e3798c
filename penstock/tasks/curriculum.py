"""Decides which tasks may be used now, with the user's function `tasks.curriculum`.

    def harder_when_ready(task, rewards):
        return task.columns["kind"] != "hard" or rewards.get("easy", 0) > 0.7

`rewards` has the mean reward of each kind of task over its newest trained answers. A kind is the name of a
reasoning_gym dataset, or the value of a task's column `kind`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import UserError
from penstock.observe.events import AnyEvent, SampleEvent
from penstock.records import Task
from penstock.scoring.gym_verifier import COLUMN
from penstock.usercode import load_function

NEWEST = 256
"""How many answers of a kind its mean is taken over."""
Admits = Callable[[Task, Mapping[str, float]], bool]


class Curriculum:
    """Decides whether a task may be used now. It reads the run's events for the rewards of trained answers."""

    def __init__(self, admits: Admits, tasks: Sequence[Task]) -> None:
        self._admits = admits
        self._kinds = {task.id: kind_of(task) for task in tasks}
        self._rewards: dict[str, deque[float]] = {}

    def observe(self, task_id: str, reward: float) -> None:
        kind = self._kinds.get(task_id)
        if kind is not None:
            self._rewards.setdefault(kind, deque(maxlen=NEWEST)).append(reward)

    def on(self, event: AnyEvent) -> None:
        if isinstance(event, SampleEvent) and event.step is not None and event.reward is not None:
            self.observe(event.task_id, event.reward)

    def close(self) -> None:
        pass

    def rewards(self) -> dict[str, tuple[float, ...]]:
        """Return the newest rewards of each kind, for a resumed run."""
        return {kind: tuple(rewards) for kind, rewards in self._rewards.items()}

    def restore(self, rewards: Mapping[str, Sequence[float]]) -> None:
        self._rewards = {kind: deque(newest, maxlen=NEWEST) for kind, newest in rewards.items()}

    def admits(self, task: Task) -> bool:
        means = {kind: sum(rewards) / len(rewards) for kind, rewards in self._rewards.items()}
        try:
            return bool(self._admits(task, means))
        except Exception as error:
            raise UserError(
                f"tasks.curriculum raised {type(error).__name__} on task {task.id!r}: {error}"
            ) from error


def load_curriculum(path: str | None, tasks: Sequence[Task]) -> Curriculum | None:
    return None if path is None else Curriculum(load_function(path, what="curriculum"), tasks)


def kind_of(task: Task) -> str:
    gym = task.columns.get(COLUMN)
    return str(gym["name"]) if isinstance(gym, dict) else str(task.columns.get("kind", ""))
