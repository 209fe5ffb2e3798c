"""What every `interfaces.Scorer` promises, over all of them."""

import asyncio
from collections.abc import Callable

import pytest

from penstock.errors import ChannelClosed, ScoringFailed
from penstock.interfaces import Scorer
from penstock.scoring.functions import Reward, score_group, wrap
from penstock.scoring.in_process import MemoryScorer, ThreadScorer
from penstock.scoring.scorer_pool import ScorerPool
from penstock.types import Group, Score, Task
from tests.scoring.groups import a_group


def number(task: Task, completion: str) -> float:
    return float(completion)


class InProcessWorker:
    """The pool's worker without a process."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def score(self, group: Group) -> tuple[Score, ...]:
        return await asyncio.to_thread(score_group, [self._reward], group)

    async def restart(self) -> None:
        raise AssertionError("nothing died")


def make_pool() -> Scorer:
    return ScorerPool([InProcessWorker(wrap(number, name="value")) for _ in range(2)], timeout_s=60)


@pytest.fixture(
    params=[
        pytest.param(lambda: MemoryScorer(number), id="memory"),
        pytest.param(lambda: ThreadScorer([wrap(number, name="value")], timeout_s=60), id="thread"),
        pytest.param(make_pool, id="pool"),
    ]
)
def make(request: pytest.FixtureRequest) -> Callable[[], Scorer]:
    maker: Callable[[], Scorer] = request.param
    return maker


def test_one_score_per_episode_in_order(make: Callable[[], Scorer]) -> None:
    async def main() -> tuple[Score, ...]:
        scorer = make()
        scores = await scorer.score(a_group("3", "1", "2"))
        await scorer.close()
        return scores

    scores = asyncio.run(main())
    assert [score.value for score in scores] == [3.0, 1.0, 2.0]
    assert scores[0].parts == {"value": 3.0}


def test_many_groups_at_once(make: Callable[[], Scorer]) -> None:
    async def main() -> list[float]:
        scorer = make()
        results = await asyncio.gather(*(scorer.score(a_group(str(index))) for index in range(20)))
        await scorer.close()
        return [scores[0].value for scores in results]

    assert asyncio.run(main()) == list(range(20))


def test_a_failure_costs_its_group_only(make: Callable[[], Scorer]) -> None:
    async def main() -> None:
        scorer = make()
        for text, reason in (("one", "score_error"), ("nan", "score_nan")):
            with pytest.raises(ScoringFailed) as raised:
                await scorer.score(a_group("1", text))
            assert raised.value.reason == reason
        assert (await scorer.score(a_group("1")))[0].value == 1.0
        await scorer.close()

    asyncio.run(main())


def test_close_may_be_called_twice_and_ends_scoring(make: Callable[[], Scorer]) -> None:
    async def main() -> None:
        scorer = make()
        await scorer.close()
        await scorer.close()
        with pytest.raises(ChannelClosed):
            await scorer.score(a_group("1"))

    asyncio.run(main())
