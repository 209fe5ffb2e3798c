import asyncio
from typing import Any, cast

from penstock.errors import RolloutFailed
from penstock.observe.event_queue import EventQueue
from penstock.observe.events import EvaluationEvent, LogLine, Span
from penstock.records import Task
from penstock.rollout.group_runner import RolloutRunner
from penstock.run.evaluation import Evaluation, EvaluationSchedule, Evaluator
from penstock.scoring.thread_scorer import MemoryScorer


class Fixed(Evaluator):
    """Every evaluation takes the training three steps further."""

    def __init__(self, training: "Training") -> None:
        self._training = training

    async def run(self) -> Evaluation:
        self._training.steps_done += 3
        return Evaluation(reward=0.5, num_episodes=4, num_failed=1, failure="the reward raised")


class Training:
    steps_done = 0

    async def reached(self, step: int) -> None:
        self.steps_done = max(self.steps_done, step)


def schedule(every: int, *, evaluator: bool = True) -> tuple[Training, list[tuple[int, float]], list[str]]:
    training, queue = Training(), EventQueue()
    one = EvaluationSchedule(
        Fixed(training) if evaluator else None,
        every=every,
        steps=20,
        events=queue.of("controller"),
    )
    asyncio.run(one.beside(training))
    asyncio.run(one.now(20))
    told = queue.take().events
    results = [(event.step, event.reward) for event in told if isinstance(event, EvaluationEvent)]
    lines = [event.line for event in told if isinstance(event, LogLine)]
    spans = [event.attributes["step"] for event in told if isinstance(event, Span)]
    assert spans == [step for step, _ in results]
    return training, results, lines


def test_steps_that_pass_during_an_evaluation_are_not_made_up_for() -> None:
    _, results, lines = schedule(2)
    assert [step for step, _ in results] == [2, 6, 10, 14, 18, 20]
    failed = "1 task could not be scored, the first since the reward raised"
    assert lines[0] == f"step 2: held-out reward 0.500; {failed}"
    assert lines[-1] == f"held-out reward 0.500 at step 20 (4 answers); {failed}"


def test_without_an_interval_there_is_only_what_is_asked_for() -> None:
    assert [step for step, _ in schedule(0)[1]] == [20]


def test_without_held_out_tasks_nothing_is_evaluated() -> None:
    assert schedule(2, evaluator=False)[1:] == ([], [])


class Runner:
    async def run_group(self, group_id: int, task: Task, *, ended: Any) -> Any:
        raise RolloutFailed(f"task {task.id} was refused", "refused")


def test_what_went_wrong_is_kept() -> None:
    tasks = [Task(id="a", prompt=""), Task(id="b", prompt="")]
    scorer = MemoryScorer(lambda task, completion: 1.0)
    found = asyncio.run(Evaluator(cast(RolloutRunner, Runner()), scorer, tasks).run())
    assert (found.num_failed, found.failure, found.mean) == (2, "task a was refused", "unknown")
    assert found.missing == "; 2 tasks could not be scored, the first since task a was refused"
