"""What every `interfaces.Scorer` promises, over all of them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.errors import ChannelClosed, ScoringFailed
from penstock.planner.simulation import SimulatedScorer
from penstock.records import Episode, Score, StepScore, Task
from penstock.records.interfaces import Scorer
from penstock.scoring.functions import calls_at_once, needs_group, wrap
from penstock.scoring.reward_thread import RewardThread
from penstock.scoring.scorer_pool import ScorerPool
from penstock.scoring.scoring_process import ScoringRequest, Verdict
from penstock.scoring.thread_scorer import MemoryScorer, ThreadScorer
from tests.scoring.groups import a_group

Maker = Callable[[Callable[..., Any]], Scorer]


def number(task: Task, completion: str) -> float:
    return float(completion)


def numbers(completions: list[str]) -> list[float]:
    return [float(completion) for completion in completions]


async def awaited(task: Task, completion: str) -> float:
    await asyncio.sleep(0)
    return float(completion)


def by_digit(task: Task, episode: Episode) -> Score:
    digits = [float(digit) for digit in episode.text]
    steps = tuple(StepScore(turn=0, start=i, end=i + 1, value=digit) for i, digit in enumerate(digits))
    return Score(value=sum(digits), parts={"first": digits[0]}, steps=steps)


class InProcessWorker:
    """The pool's worker without a process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        rewards = [wrap(function, name="value")]
        self._thread = RewardThread(rewards)
        self.needs_group = needs_group(rewards)
        self.concurrency = calls_at_once(rewards, 4)

    async def answer(self, requests: Sequence[ScoringRequest]) -> Sequence[Verdict]:
        return await self._thread.answer(requests)

    async def end(self) -> None:
        raise AssertionError("nothing died")

    async def restart(self, num_deaths: int) -> None:
        raise AssertionError("nothing died")


def make_thread(function: Callable[..., Any]) -> Scorer:
    return ThreadScorer([wrap(function, name="value")], timeout_s=60)


def make_pool(function: Callable[..., Any]) -> Scorer:
    workers = [InProcessWorker(function) for _ in range(2)]
    places = [(worker, worker.concurrency) for worker in workers]
    return ScorerPool(places, needs_group=workers[0].needs_group, timeout_s=60)


def make_simulated(function: Callable[..., Any]) -> Scorer:
    group = needs_group([wrap(function)])
    return SimulatedScorer(score_s=lambda: 0.0, value=function, needs_group=group)


@pytest.fixture(params=[MemoryScorer, make_thread, make_pool, make_simulated])
def make(request: pytest.FixtureRequest) -> Maker:
    maker: Maker = request.param
    return maker


async def one_by_one(scorer: Scorer, *texts: str) -> tuple[Score, ...]:
    group = a_group(*texts)
    calls = (scorer.score_episode(group.task, episode) for episode in group.episodes)
    return tuple(await asyncio.gather(*calls))


async def as_group(scorer: Scorer, *texts: str) -> tuple[Score, ...]:
    return await scorer.score(a_group(*texts))


@pytest.mark.parametrize("way", [one_by_one, as_group])
@pytest.mark.parametrize("function", [number, awaited])
def test_one_score_per_episode_in_order(make: Maker, way: Any, function: Callable[..., Any]) -> None:
    async def main() -> tuple[Score, ...]:
        scorer = make(function)
        assert scorer.needs_group is False
        scores: tuple[Score, ...] = await way(scorer, "3", "1", "2")
        await scorer.close()
        return scores

    scores = asyncio.run(main())
    assert [score.value for score in scores] == [3.0, 1.0, 2.0]
    assert scores[0].parts == {"value": 3.0}


@pytest.mark.parametrize("way", [one_by_one, as_group])
def test_steps_and_parts_of_a_score_come_through(make: Maker, way: Any) -> None:
    async def main() -> tuple[Score, ...]:
        scorer = make(by_digit)
        scores: tuple[Score, ...] = await way(scorer, "12", "70")
        await scorer.close()
        return scores

    scores = asyncio.run(main())
    assert [score.value for score in scores] == [3.0, 7.0]
    assert scores[1].parts == {"value": 7.0, "value.first": 7.0}
    assert [(step.start, step.end, step.value) for step in scores[0].steps] == [(0, 1, 1.0), (1, 2, 2.0)]


def test_a_function_that_needs_the_group_gets_it(make: Maker) -> None:
    async def main() -> None:
        scorer = make(numbers)
        assert scorer.needs_group is True
        assert [score.value for score in await scorer.score(a_group("3", "1"))] == [3.0, 1.0]
        with pytest.raises(ValueError, match="needs_group=False; score the whole group"):
            await one_by_one(scorer, "1")
        await scorer.close()

    asyncio.run(main())


def test_many_calls_at_once(make: Maker) -> None:
    async def main() -> list[float]:
        scorer = make(number)
        results = await asyncio.gather(
            *(scorer.score(a_group(str(index))) for index in range(10)),
            *(one_by_one(scorer, str(index)) for index in range(10, 20)),
        )
        await scorer.close()
        return [scores[0].value for scores in results]

    assert asyncio.run(main()) == list(range(20))


@pytest.mark.parametrize("way", [one_by_one, as_group])
def test_a_failure_costs_its_group_only(make: Maker, way: Any) -> None:
    async def main() -> None:
        scorer = make(number)
        for text, reason in (("one", "score_error"), ("nan", "score_nan")):
            with pytest.raises(ScoringFailed) as raised:
                await way(scorer, "1", text)
            assert raised.value.reason == reason
        assert (await way(scorer, "1"))[0].value == 1.0
        await scorer.close()

    asyncio.run(main())


def test_close_may_be_called_twice_and_ends_scoring(make: Maker) -> None:
    async def main() -> None:
        scorer = make(number)
        await scorer.close()
        await scorer.close()
        for way in (one_by_one, as_group):
            with pytest.raises(ChannelClosed):
                await way(scorer, "1")

    asyncio.run(main())


class Unfloatable:
    def __float__(self) -> float:
        raise KeyboardInterrupt


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit


def raises(error: BaseException) -> Callable[..., Any]:
    def reward(task: Task, completion: str) -> float:
        if completion == "bad":
            raise error
        return 1.0

    return reward


def raises_awaited(error: BaseException) -> Callable[..., Any]:
    async def reward(task: Task, completion: str) -> float:
        await asyncio.sleep(0)
        if completion == "bad":
            raise error
        return 1.0

    return reward


def returns(value: Any) -> Callable[..., Any]:
    return lambda task, completion: value if completion == "bad" else 1.0


async def cancels_itself(task: Task, completion: str) -> float:
    if completion == "bad":
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(0)
    return 1.0


ERRORS = (asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Unprintable())
HOSTILE = [
    *(kind(error) for error in ERRORS for kind in (raises, raises_awaited)),
    returns(Unfloatable()),
    returns(Score(value=Unfloatable())),  # type: ignore[arg-type]
    cancels_itself,
]


@pytest.mark.parametrize("function", HOSTILE)
@pytest.mark.parametrize("way", [one_by_one, as_group])
def test_whatever_a_function_raises_or_returns_costs_its_group_alone(
    make: Maker, way: Any, function: Callable[..., Any]
) -> None:
    async def main() -> None:
        scorer = make(function)
        async with asyncio.timeout(20):
            with pytest.raises(ScoringFailed):
                await way(scorer, "good", "bad")
            assert (await way(scorer, "good"))[0].value == 1.0
        await scorer.close()

    asyncio.run(main())


def test_a_function_can_change_neither_tasks_nor_episodes(make: Maker) -> None:
    def pops(task: Task, episode: Episode) -> float:
        episode.turns[0].output_ids[0] = 0
        task.columns["words"].append("more")
        return float(len(task.columns.pop("words")))

    group = a_group("1", "2", words=["one"])
    ids = group.episodes[0].turns[0].output_ids.copy()

    async def main() -> tuple[Score, ...]:
        scorer = make(pops)
        scores = await scorer.score(group)
        await scorer.close()
        return scores

    assert [score.value for score in asyncio.run(main())] == [2.0, 2.0]
    assert group.task.columns == {"words": ["one"]}
    assert group.episodes[0].turns[0].output_ids.tolist() == ids.tolist()
