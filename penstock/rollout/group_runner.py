"""Runs a task's group: G episodes at once, with the failed ones kept apart."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from penstock.errors import RolloutFailed
from penstock.records import CallAnswer, Episode, Group, SamplingParams, Task
from penstock.rollout.episode_runner import REFUSED, UNAVAILABLE, EpisodeRunner
from penstock.rollout.episode_spec import TRAINING, EpisodeSpec, check_replayed

FAILED_EPISODES = "failed_episodes"
"""Too few episodes of the group succeeded."""


class RolloutRunner:
    """Runs groups. At least `min_good` episodes of a group must succeed: two by default (one, in groups of one),
    since fewer can't be compared."""

    def __init__(
        self,
        episodes: EpisodeRunner,
        *,
        sampling: SamplingParams,
        group_size: int,
        min_good: int | None = None,
        chunk_tokens: int = 32,
        timeout_s: float = 1800.0,
        label: str = TRAINING,
        max_turns: int = 0,
        max_episode_tokens: int = 0,
    ) -> None:
        """Set up a runner; `max_turns` and `max_episode_tokens` limit an episode, and 0 means no limit."""
        if label == TRAINING:
            check_replayed(sampling)
        self._episodes = episodes
        self._sampling = sampling
        self._group_size = group_size
        self._min_good = min(2, group_size) if min_good is None else min_good
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._label = label
        self._max_turns = max_turns
        self._max_tokens = max_episode_tokens

    async def run_group(
        self,
        number: int,
        task: Task,
        *,
        ended: Callable[[Episode], None] = lambda episode: None,
        done: Mapping[int, Episode] | None = None,
        calls: Sequence[CallAnswer] = (),
    ) -> Group:
        """Run the episodes of one group. `done` holds, by index, those that ended before a restart; `calls` are
        those that the others had made by then. `ended` is called with each episode as it ends, and with those
        of `done`. Raise `RolloutFailed` when too few succeed, and pass on errors that end the run."""
        known = done or {}

        async def run(index: int) -> Episode:
            made = tuple(call for call in calls if call.episode == index)
            episode = known.get(index) or await self._episodes.run(self._spec(number, index, task, made))
            ended(episode)
            return episode

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run(index)) for index in range(self._group_size)]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        group = Group.of(number, task, (one.result() for one in running))
        self._check(group)
        return group

    def _check(self, group: Group) -> None:
        if len(group.episodes) >= self._min_good:
            return
        first = group.failures[0]
        message = (
            f"{len(group.failures)} of {self._group_size} episodes of task {group.task.id!r} failed; "
            f"the first ({first.failure}): {first.message}"
        )
        reasons = {episode.failure or "" for episode in group.failures}
        reason = reasons.pop() if len(reasons) == 1 and reasons <= {REFUSED, UNAVAILABLE} else FAILED_EPISODES
        raise RolloutFailed(message, reason)

    def _spec(self, number: int, index: int, task: Task, calls: tuple[CallAnswer, ...]) -> EpisodeSpec:
        return EpisodeSpec(
            group=number,
            index=index,
            task=task,
            sampling=self._sampling,
            label=self._label,
            chunk_tokens=self._chunk_tokens,
            timeout_s=self._timeout_s,
            max_turns=self._max_turns,
            max_tokens=self._max_tokens,
            calls=calls,
        )
