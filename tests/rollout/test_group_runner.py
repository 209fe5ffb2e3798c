"""Failed episodes cost themselves; with too few good ones the group goes."""

import asyncio
from typing import Any

import pytest

from penstock.errors import ChannelClosed, RolloutFailed
from penstock.records import Episode, Group, SamplingParams, Task
from penstock.rollout.episode_runner import failed_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.group_runner import RolloutRunner

TASK = Task(id="sum", prompt="1+1=")


class Episodes:
    """Fails the episodes that it is told to, by index."""

    def __init__(self, **failures: str) -> None:
        self.failures = {int(index.removeprefix("e")): reason for index, reason in failures.items()}
        self.specs: list[EpisodeSpec] = []

    async def run(self, spec: EpisodeSpec) -> Episode:
        self.specs.append(spec)
        reason = self.failures.get(spec.index)
        if reason == "engine":
            raise ChannelClosed("gone")
        if reason is not None:
            return failed_episode(spec, reason, f"episode {spec.index}")
        return Episode(task_id=spec.task.id, turns=(), index=spec.index)

    async def close(self) -> None:
        pass


def runner(episodes: Episodes, size: int = 4, **arguments: Any) -> RolloutRunner:
    return RolloutRunner(episodes, sampling=SamplingParams(seed=5), group_size=size, **arguments)


def run(episodes: Episodes, size: int = 4, **arguments: Any) -> Group:
    return asyncio.run(runner(episodes, size, **arguments).run_group(7, TASK))


def test_failed_episodes_are_kept_apart() -> None:
    group = run(Episodes(e1="timeout", e2="workflow_error"))
    assert [episode.index for episode in group.episodes] == [0, 3]
    assert [(episode.index, episode.failure) for episode in group.failures] == [
        (1, "timeout"),
        (2, "workflow_error"),
    ]


def test_episodes_are_told_as_they_end() -> None:
    ended: list[int] = []
    asyncio.run(
        runner(Episodes(e1="timeout")).run_group(7, TASK, ended=lambda episode: ended.append(episode.index))
    )
    assert ended == [0, 1, 2, 3]


def test_one_good_episode_of_several_is_too_few() -> None:
    with pytest.raises(RolloutFailed) as failed:
        run(Episodes(e0="timeout", e1="timeout", e3="worker_died"))
    assert failed.value.reason == "failed_episodes"
    assert str(failed.value) == "3 of 4 episodes of task 'sum' failed; the first (timeout): episode 0"


def test_a_group_of_one_needs_one() -> None:
    assert len(run(Episodes(), size=1).episodes) == 1
    with pytest.raises(RolloutFailed):
        run(Episodes(e0="timeout"), size=1)


def test_an_evaluation_takes_what_it_gets() -> None:
    assert len(run(Episodes(e0="timeout"), size=2, min_good=1).episodes) == 1


def test_a_task_that_engines_refuse_goes_by_that_name() -> None:
    with pytest.raises(RolloutFailed) as failed:
        run(Episodes(e0="refused", e1="refused"), size=2)
    assert failed.value.reason == "refused"


@pytest.mark.parametrize(
    ("other", "reason"),
    [("workflow_unavailable", "workflow_unavailable"), ("workflow_error", "failed_episodes")],
)
def test_a_group_that_could_reach_nothing_says_so(other: str, reason: str) -> None:
    with pytest.raises(RolloutFailed) as failed:
        run(Episodes(e0="workflow_unavailable", e1=other), size=2)
    assert failed.value.reason == reason


def test_what_ends_the_run_is_raised_as_itself() -> None:
    with pytest.raises(ChannelClosed):
        run(Episodes(e1="engine"))


def test_episodes_are_asked_for_by_group_and_index() -> None:
    episodes = Episodes()
    run(episodes, size=2, label="e", timeout_s=9.0)
    assert [(spec.name, spec.timeout_s, spec.sampling.seed) for spec in episodes.specs] == [
        ("e7.0", 9.0, 5),
        ("e7.1", 9.0, 5),
    ]
