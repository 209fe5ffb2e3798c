"""Scoring beside the rollout of a group, in virtual time."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from penstock.errors import RequestRefused, ScoringFailed
from penstock.loop.group_scoring import GroupScoring
from penstock.planner.simulation import SimulatedScorer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Episode, Group, Task
from tests.scoring.groups import a_group

TASK = Task(id="t", prompt="p")


def value(task: Task, episode: Episode) -> float:
    return float(episode.text)


def scorer(*, needs_group: bool = False) -> SimulatedScorer:
    return SimulatedScorer(score_s=lambda: 4.0, value=value, needs_group=needs_group)


class Rollout:
    """Episode i ends after `seconds[i]`, with `texts[i]`."""

    def __init__(self, *seconds: float, texts: str = "0123456789") -> None:
        self._seconds = seconds
        self._episodes = a_group(*texts[: len(seconds)]).episodes
        self.num_ended = 0

    async def run(self, ended: Callable[[Episode], None]) -> Group:
        async def one(episode: Episode, seconds: float) -> None:
            await asyncio.sleep(seconds)
            self.num_ended += 1
            ended(episode)

        async with asyncio.TaskGroup() as tasks:
            for episode, seconds in zip(self._episodes, self._seconds, strict=True):
                tasks.create_task(one(episode, seconds))
        return Group(number=0, task=TASK, episodes=self._episodes)


async def scored(rollout: Rollout, scorer: SimulatedScorer) -> tuple[list[float], float]:
    """The values, and when they were all there."""
    async with GroupScoring(scorer, TASK) as scoring:
        group = await rollout.run(scoring.ended)
        scores = await scoring.scores(group)
    return [score.value for score in scores], asyncio.get_running_loop().time()


@pytest.mark.parametrize("needs_group", [False, True])
def test_scores_come_in_the_groups_order(needs_group: bool) -> None:
    rollout = Rollout(10.0, 3.0, 5.0)
    values, time = run_in_virtual_time(scored(rollout, scorer(needs_group=needs_group)))
    assert (values, time) == ([0, 1, 2], 14.0)


def test_episodes_are_scored_while_stragglers_still_run() -> None:
    seen: list[tuple[float, str]] = []

    def note(task: Task, episode: Episode) -> float:
        seen.append((asyncio.get_running_loop().time(), episode.text))
        return 0.0

    early = SimulatedScorer(score_s=lambda: 4.0, value=note)
    run_in_virtual_time(scored(Rollout(10.0, 3.0, 5.0), early))
    assert seen == [(7.0, "1"), (9.0, "2"), (14.0, "0")]
    seen.clear()
    late = SimulatedScorer(score_s=lambda: 4.0, value=note, needs_group=True)
    run_in_virtual_time(scored(Rollout(10.0, 3.0, 5.0), late))
    assert seen == [(14.0, "0"), (14.0, "1"), (14.0, "2")]


def test_failed_episodes_are_not_scored() -> None:
    good = a_group("7").episodes[0]
    failed = msgspec.structs.replace(good, turns=(), failure="timeout")

    async def main() -> list[float]:
        async with GroupScoring(scorer(), TASK) as scoring:
            scoring.ended(failed)
            scoring.ended(good)
            scores = await scoring.scores(Group(number=0, task=TASK, episodes=(good,), failures=(failed,)))
        return [score.value for score in scores]

    assert run_in_virtual_time(main()) == [7.0]


def test_an_episode_that_cannot_be_scored_ends_the_group_at_once() -> None:
    rollout = Rollout(100.0, 3.0, texts="0x")

    async def main() -> None:
        with pytest.raises(ScoringFailed) as raised:
            await scored(rollout, scorer())
        assert raised.value.reason == "score_error"
        assert asyncio.get_running_loop().time() == 7.0

    run_in_virtual_time(main())
    assert rollout.num_ended == 1


def test_what_the_rollout_raises_comes_out_as_itself_and_calls_end() -> None:
    async def refused() -> None:
        async with GroupScoring(scorer(), TASK) as scoring:
            scoring.ended(a_group("1").episodes[0])
            await asyncio.sleep(1.0)
            raise RequestRefused("too long")

    async def main() -> None:
        with pytest.raises(RequestRefused, match="too long"):
            await refused()
        assert asyncio.get_running_loop().time() == 1.0
        assert len(asyncio.all_tasks()) == 1

    run_in_virtual_time(main())
