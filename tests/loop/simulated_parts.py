"""The parts of a controller without processes: an engine, a trainer and a scorer that are simulated, and tasks
without end."""

from typing import Any

from penstock.engines.engine_pool import EnginePool
from penstock.planner.simulation import SimulatedScorer, SimulatedTokenizer
from penstock.records import Task
from penstock.run.assembly import Parts


class Tasks:
    """Remembers which tasks were issued and which came back; those that came back are issued first."""

    def __init__(self) -> None:
        self.issued: list[str] = []
        self.returned: list[str] = []
        self.num_taken = 0
        self._queue: list[Task] = []

    def next(self) -> Task:
        if self._queue:
            task = self._queue.pop(0)
        else:
            self.num_taken += 1
            task = self.task(f"t{len(self.issued)}")
        self.issued.append(task.id)
        return task

    def put_back(self, task: Task) -> None:
        self.returned.append(task.id)
        self._queue.append(task)

    def task(self, task_id: str) -> Task:
        return Task(id=task_id, prompt="p")


def simulated_parts(engine: Any, trainer: Any, *, score_s: float = 0.01, **others: Any) -> Parts:
    """One engine and one trainer; the score of an episode is its number in the group."""
    parts = {
        "scorer": SimulatedScorer(score_s=lambda: score_s, value=lambda task, episode: float(episode.index)),
        "tasks": Tasks(),
        **others,
    }
    return Parts(
        engines=EnginePool({"engine0": engine}), trainers=[trainer], tokenizer=SimulatedTokenizer(), **parts
    )
