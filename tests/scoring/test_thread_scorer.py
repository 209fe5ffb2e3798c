"""Scoring in a thread: the same answers, and a function that hangs holds nothing up."""

import asyncio
import threading

import pytest

from penstock.errors import ScoringFailed
from penstock.records import Task
from penstock.scoring.functions import wrap
from penstock.scoring.thread_scorer import ThreadScorer
from tests.scoring.groups import a_group


def test_functions_by_name_by_themselves_and_with_weights() -> None:
    functions = [
        "exact_match",
        lambda task, completion: 0.5,
        wrap(lambda completions: [3.0], name="w", weight=2.0),
    ]
    scorer = ThreadScorer(functions)
    (score,) = asyncio.run(scorer.score(a_group("2", answer="2")))
    assert score.value == 7.5
    assert score.parts == {"exact_match": 1.0, "<lambda>": 0.5, "w": 3.0}


def test_functions_of_one_name_all_count() -> None:
    scorer = ThreadScorer([lambda task, completion: 1.0, lambda task, completion: 10.0])
    (score,) = asyncio.run(scorer.score(a_group("x")))
    assert score.value == 11.0
    assert score.parts == {"<lambda>": 1.0, "<lambda>_2": 10.0}


def test_functions_run_outside_the_callers_thread_one_at_a_time() -> None:
    running = 0
    names = set()

    def reward(task: Task, completion: str) -> float:
        nonlocal running
        running += 1
        names.add(threading.current_thread().name)
        assert running == 1
        running -= 1
        return 1.0

    async def main() -> None:
        scorer = ThreadScorer([reward])
        await asyncio.gather(*(scorer.score(a_group("a", "b")) for _ in range(8)))

    asyncio.run(main())
    assert names == {"penstock-reward"}


def test_a_function_that_hangs_costs_its_group_and_no_more() -> None:
    release = threading.Event()

    def reward(task: Task, completion: str) -> float:
        if completion == "hang":
            release.wait(60)
        return 1.0

    async def main() -> None:
        scorer = ThreadScorer([reward], timeout_s=0.3)
        with pytest.raises(ScoringFailed) as raised:
            await scorer.score(a_group("hang"))
        assert raised.value.reason == "score_timeout"
        assert str(raised.value) == "scoring task 't' took longer than reward.timeout_s=0.3"
        assert scorer.num_abandoned == 1
        (score,) = await scorer.score(a_group("fine"))
        assert score.value == 1.0

    asyncio.run(main())
    release.set()


def test_async_functions_work_in_the_thread() -> None:
    async def reward(task: Task, completion: str) -> float:
        await asyncio.sleep(0)
        return float(completion)

    (score,) = asyncio.run(ThreadScorer([reward]).score(a_group("4")))
    assert score.value == 4.0


def test_a_task_left_behind_that_exits_does_not_end_the_thread() -> None:
    left: list[asyncio.Task[None]] = []

    async def reward(task: Task, completion: str) -> float:
        async def leave() -> None:
            raise SystemExit

        left.append(asyncio.create_task(leave()))
        await asyncio.sleep(0.01)
        return 1.0

    async def main() -> list[float]:
        scorer = ThreadScorer([reward], timeout_s=10)
        return [(await scorer.score(a_group("x")))[0].value for _ in range(2)]

    assert asyncio.run(main()) == [1.0, 1.0]
    assert [type(task.exception()) for task in left] == [SystemExit, SystemExit]
