"""Scores that come at a later try, in virtual time."""

import asyncio

import pytest

from penstock.errors import ScoringFailed
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Task
from penstock.scoring.retrying import RetryingScorer
from penstock.scoring.thread_scorer import MemoryScorer
from tests.scoring.groups import a_group


class Judge:
    """Fails with each of these, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self, task: Task, completion: str) -> float:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7.0


class RateLimitError(Exception):
    """As OpenAI's client calls it."""


def score(judge: Judge, retries: int = 3) -> tuple[float | str, float]:
    """The score or the reason why there is none, and how long that took."""

    async def main() -> tuple[float | str, float]:
        scorer = RetryingScorer(MemoryScorer(judge), retries=retries)
        assert scorer.needs_group is False
        group = a_group("1")
        try:
            outcome: float | str = (await scorer.score_episode(group.task, group.episodes[0])).value
        except ScoringFailed as error:
            outcome = error.reason
        return outcome, asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError("no"), TimeoutError("late"), RateLimitError("many")]
)
def test_what_could_not_be_reached_is_tried_again_later_each_time(error: Exception) -> None:
    judge = Judge(error, error)
    assert score(judge) == (7.0, 3.0)
    assert judge.num_calls == 3


def test_after_the_last_try_the_reason_is_told() -> None:
    judge = Judge(*[ConnectionResetError("gone")] * 9)
    assert score(judge) == ("score_unavailable", 7.0)
    assert judge.num_calls == 4


@pytest.mark.parametrize("error", [KeyError("anwser"), FileNotFoundError("rules.json")])
def test_what_will_never_succeed_fails_at_once(error: Exception) -> None:
    judge = Judge(error, error)
    assert score(judge) == ("score_error", 0.0)
    assert judge.num_calls == 1


def test_without_retries_nothing_is_tried_again() -> None:
    assert score(Judge(ConnectionError("no")), retries=0) == ("score_unavailable", 0.0)


def test_a_group_is_tried_again_as_a_whole() -> None:
    async def main() -> list[float]:
        scorer = RetryingScorer(MemoryScorer(Judge(ConnectionError("no"))), retries=1)
        return [one.value for one in await scorer.score(a_group("1", "2"))]

    assert run_in_virtual_time(main()) == [7.0, 7.0]
