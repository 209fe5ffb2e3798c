"""Evaluates on held-out tasks, with the engines and scorers of the run and without training, and schedules it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import PenstockError, RolloutFailed, ScoringFailed
from penstock.loop.group_scoring import GroupScoring
from penstock.observe.events import EvaluationEvent
from penstock.observe.recorder import Recorder
from penstock.records import Task
from penstock.records.interfaces import Scorer
from penstock.rollout.group_runner import RolloutRunner

MAX_IN_FLIGHT = 64
Rewards = list[float] | PenstockError
"""The rewards of the good answers to one task, or the error why it could not be generated or scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Holds the mean held-out reward. Tasks that could not be scored are counted, not averaged."""

    reward: float
    num_episodes: int
    num_failed: int
    failure: str = ""
    """What went wrong with the first task that failed."""

    @property
    def mean(self) -> str:
        return f"{self.reward:.3f}" if self.num_episodes else "unknown"

    @property
    def missing(self) -> str:
        """Return what a log line about the evaluation ends with; "" when every task was scored."""
        if not self.num_failed:
            return ""
        tasks = "1 task" if self.num_failed == 1 else f"{self.num_failed} tasks"
        return f"; {tasks} could not be scored, the first since {self.failure}"


class Evaluator:
    """Generates and scores answers to every held-out task. Its requests go before those of training (negative
    priority)."""

    def __init__(self, runner: RolloutRunner, scorer: Scorer, tasks: Sequence[Task]) -> None:
        self._runner = runner
        self._scorer = scorer
        self._tasks = tasks

    async def run(self) -> Evaluation:
        results = await self.rewards()
        values = [value for result in results if isinstance(result, list) for value in result]
        failures = [result for result in results if isinstance(result, PenstockError)]
        return Evaluation(
            reward=sum(values) / len(values) if values else float("nan"),
            num_episodes=len(values),
            num_failed=len(failures),
            failure=str(failures[0]) if failures else "",
        )

    async def rewards(self) -> list[Rewards]:
        in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def one(number: int, task: Task) -> Rewards:
            async with in_flight:
                try:
                    async with GroupScoring(self._scorer, task) as scoring:
                        group = await self._runner.run_group(number, task, ended=scoring.ended)
                        return [score.value for score in await scoring.scores(group)]
                except (RolloutFailed, ScoringFailed) as failure:
                    return failure

        count = len(self._tasks)
        return await asyncio.gather(*(one(i - count, task) for i, task in enumerate(self._tasks)))


class Progress(Protocol):
    """Reports how far training has come."""

    @property
    def steps_done(self) -> int: ...

    async def reached(self, step: int) -> None:
        """Wait until this many steps are done."""


class EvaluationWatch(Protocol):
    """Is called when an evaluation begins and ends. `step` is that of the weights at its beginning."""

    def evaluation_began(self, step: int) -> None: ...

    def evaluation_ended(self, step: int, reward: float) -> None: ...


class EvaluationSchedule:
    """Evaluates at the start, at the end and every so many steps; without an evaluator it does nothing."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        *,
        every: int,
        steps: int,
        events: Recorder,
        watch: EvaluationWatch | None = None,
    ) -> None:
        self._watch = watch
        self._evaluator = evaluator
        self._every = every
        self._steps = steps
        self._events = events

    async def now(self, step: int) -> None:
        """Evaluate while nothing else is generated."""
        if self._evaluator is None:
            return
        result = await self._evaluate(self._evaluator, step)
        answers = f"{result.num_episodes} answers"
        self._events.log(f"held-out reward {result.mean} at step {step} ({answers}){result.missing}")

    async def beside(self, training: Progress) -> None:
        """Evaluate beside training, on the weights that the engines serve meanwhile.

        A step that is due while an evaluation runs is skipped.
        """
        if self._evaluator is None or self._every == 0:
            return
        step = (training.steps_done // self._every + 1) * self._every
        while step < self._steps:
            await training.reached(step)
            result = await self._evaluate(self._evaluator, step)
            self._events.log(f"step {step}: held-out reward {result.mean}{result.missing}")
            step = (training.steps_done // self._every + 1) * self._every

    async def _evaluate(self, evaluator: Evaluator, step: int) -> Evaluation:
        events = self._events
        if self._watch is not None:
            self._watch.evaluation_began(step)
        with events.measure("evaluation", "evaluate", step=step):
            result = await evaluator.run()
        events.emit(
            EvaluationEvent(
                process=events.process,
                time=events.now(),
                step=step,
                reward=result.reward,
                num_episodes=result.num_episodes,
                num_failed=result.num_failed,
            )
        )
        if self._watch is not None:
            self._watch.evaluation_ended(step, result.reward)
        return result
