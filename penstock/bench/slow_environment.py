"""Makes rollouts wait for a simulated environment, which makes answers long-tailed in benches on a CPU."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from penstock.records import Task, Turn
from penstock.rollout.episode_rollout import Rollout
from penstock.run.summary import Summary

MEDIAN_OF_STEP = 0.2
"""The median wait, as a share of the trainer's own time for a step."""


class Latency(Protocol):
    """Draws the seconds that an environment takes."""

    def draw(self) -> float: ...


class NoLatency:
    """Answers at once."""

    def draw(self) -> float:
        return 0.0


class SlowEnvironment:
    """Runs a single turn that ends only when its environment has answered. Held-out episodes do not wait.

    `answer_s` has the seconds that each answer took, generation and wait together.
    """

    def __init__(self, latency: Latency) -> None:
        self.answer_s: list[float] = []
        self._latency = latency

    async def run(self, task: Task, rollout: Rollout) -> Turn:
        begun = time.perf_counter()
        turn = await rollout.generate(task.prompt)
        if not rollout.spec.is_evaluation:
            await asyncio.sleep(self._latency.draw())
            self.answer_s.append(time.perf_counter() - begun)
        return turn


def measured_step_s(summary: Summary) -> float:
    """Return the synchronous trainer's own time per step."""
    return summary.trainer_time["worked"] * summary.training_s / summary.steps


def answer_times(answer_s: Sequence[float]) -> dict[str, float]:
    """Return the median, and the mean of the slowest tenth."""
    ordered = sorted(answer_s)
    if not ordered:
        return {}
    slowest = ordered[-max(1, len(ordered) // 10) :]
    return {
        "answer_median_s": ordered[len(ordered) // 2],
        "answer_slowest_tenth_s": sum(slowest) / len(slowest),
    }
