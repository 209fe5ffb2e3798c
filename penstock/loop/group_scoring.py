"""Scores a group's episodes: each as it ends, beside the rollout of the others, where the reward allows it."""

import asyncio
from collections.abc import Mapping
from types import TracebackType

from penstock.loop.group_log import GroupLog, NoGroupLog
from penstock.records import Episode, EpisodeScore, Group, Score, Task, WorkProgressed
from penstock.records.interfaces import Scorer


class GroupScoring:
    """Scores the episodes of one group while the block runs its rollout.

        async with GroupScoring(scorer, task) as scoring:
            group = await runner.run_group(number, task, ended=scoring.ended)
            scores = await scoring.scores(group)

    An episode that can't be scored fails the group at once: the others are cancelled, and the block raises
    `ScoringFailed`. An error of the block itself is raised unchanged.
    """

    def __init__(
        self,
        scorer: Scorer,
        task: Task,
        *,
        number: int = 0,
        known: Mapping[int, Score] | None = None,
        log: GroupLog | None = None,
    ) -> None:
        """`known` are scores from before a restart, by the index of their episode. Every other score goes into
        the `log` while episodes are scored one by one."""
        self._scorer = scorer
        self._task = task
        self._known = dict(known or {})
        self._number = number
        self._log: GroupLog = log or NoGroupLog()
        self._calls = asyncio.TaskGroup()
        self._early: dict[int, asyncio.Task[Score]] = {}

    async def __aenter__(self) -> "GroupScoring":
        await self._calls.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._calls.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def ended(self, episode: Episode) -> None:
        """Begin to score an episode that is over. A failed one is not scored."""
        if episode.failure is None and not self._scorer.needs_group:
            self._early[id(episode)] = self._calls.create_task(self._score(episode))

    async def scores(self, group: Group) -> tuple[Score, ...]:
        """Return one score per episode of the finished group, in its order."""
        if self._scorer.needs_group:
            return await self._scorer.score(group)
        return tuple([await self._early[id(episode)] for episode in group.episodes])

    async def _score(self, episode: Episode) -> Score:
        if episode.index in self._known:
            return self._known[episode.index]
        score = await self._scorer.score_episode(self._task, episode)
        one = EpisodeScore(group=self._number, episode=episode.index, score=score)
        self._log.append(WorkProgressed(scores=(one,)))
        return score
