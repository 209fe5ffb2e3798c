"""Retries episodes whose workflow failed with a transient error.

    run ─► workflow_unavailable ─► wait 1, 2, 4 … s ─► run again, with the turns and calls so far
     └───► anything else: that is the episode

A retried workflow gets its finished turns and the results of its calls through the rollout, as after a
restart. Neither is made twice; only evaluations repeat calls.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import msgspec

from penstock.http_server.http_calls import retry_wait_s
from penstock.records import CallAnswer, Episode
from penstock.rollout.episode_runner import UNAVAILABLE, EpisodeRunner
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.replayed_calls import KeepCall, keep_nothing


class CallsSoFar:
    """Records the results of calls that running episodes have made. `keep`, a `KeepCall`, passes each result on
    to `then`."""

    def __init__(self, then: KeepCall = keep_nothing) -> None:
        self._then = then
        self._by_episode: dict[tuple[int, int], dict[int, CallAnswer]] = defaultdict(dict)

    async def keep(self, answer: CallAnswer) -> None:
        self._by_episode[answer.group, answer.episode][answer.call] = answer
        await self._then(answer)

    def of(self, spec: EpisodeSpec) -> tuple[CallAnswer, ...]:
        """Return the results that the episode started with, and those since."""
        known = {answer.call: answer for answer in spec.calls}
        if not spec.is_evaluation:
            known |= self._by_episode.get((spec.group, spec.index), {})
        return tuple(known.values())

    def forget(self, spec: EpisodeSpec) -> None:
        if not spec.is_evaluation:
            self._by_episode.pop((spec.group, spec.index), None)


class RetryingEpisodes:
    """Wraps another `EpisodeRunner`, whose episodes must report their calls to `calls`. `report` is called before
    each retry with the failed episode, the number of retries so far with this one, and the wait in seconds."""

    def __init__(
        self,
        episodes: EpisodeRunner,
        calls: CallsSoFar,
        *,
        retries: int,
        report: Callable[[Episode, int, float], None] = lambda episode, count, wait_s: None,
    ) -> None:
        self._episodes = episodes
        self._calls = calls
        self._retries = retries
        self._report = report
        self._num_retries = 0

    async def run(self, spec: EpisodeSpec) -> Episode:
        try:
            for attempt in range(self._retries):
                episode = await self._episodes.run(spec)
                if episode.failure != UNAVAILABLE:
                    return episode
                waits = retry_wait_s(attempt)
                self._num_retries += 1
                self._report(episode, self._num_retries, waits)
                await asyncio.sleep(waits)
                turns = {turn.id: turn for turn in (*spec.turns, *episode.turns)}
                spec = msgspec.structs.replace(spec, turns=tuple(turns.values()), calls=self._calls.of(spec))
            return await self._episodes.run(spec)
        finally:
            self._calls.forget(spec)

    async def close(self) -> None:
        await self._episodes.close()
