"""Runs episodes on worker processes, with a limit of commands at once. An episode that hangs in a call fails alone:
its process gets no new episodes, and is replaced when its other episodes have ended."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.channel.pooled_calls import CallKind, CallLost, PoolWorker
from penstock.channel.worker_pool import MAX_DEATHS_IN_A_ROW, START_S, WorkerPool
from penstock.errors import ChannelClosed, RemoteError, WorkerDied
from penstock.records import Episode
from penstock.rollout.episode_runner import TIMEOUT, WORKER_DIED, failed_episode
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_process import Outcome
from penstock.usercode import is_command

SILENCE_S = 30.0
"""A worker that has not answered this long after an episode's time limit hangs as a whole."""


class EpisodePool:
    """Runs episodes on a worker pool, as an `EpisodeRunner`, with `capacity` episodes in each worker."""

    def __init__(
        self,
        workers: Sequence[PoolWorker[EpisodeSpec, Outcome]],
        *,
        capacity: int,
        workflow: str | None = None,
        commands: int = 1,
        start_s: float = START_S,
        silence_s: float = SILENCE_S,
        max_deaths: int = MAX_DEATHS_IN_A_ROW,
        report: Callable[[str], None] = lambda words: None,
    ) -> None:
        """`workflow` is for tasks that name none. Of workflows that are commands, at most `commands` run at
        once."""
        kind: CallKind[EpisodeSpec, Outcome] = CallKind(
            worker="rollout",
            advice="look at the workflow, and at what ends processes on this machine (rollout.memory_gb, "
            "rollout.cpu_s)",
            task=lambda spec: ((spec.label, spec.group), spec.index, f"task {spec.task.id!r}"),
            limit_s=lambda spec: spec.timeout_s + silence_s,
            late=lambda spec: "the process that ran the episode stopped answering",
            spoils=lambda outcome: outcome.stuck,
        )
        places = [(worker, capacity) for worker in workers]
        self._pool = WorkerPool(places, kind, start_s=start_s, max_deaths=max_deaths, report=report)
        self._workflow = workflow
        self._commands = asyncio.Semaphore(commands)

    async def run(self, spec: EpisodeSpec) -> Episode:
        workflow = spec.task.workflow or self._workflow
        if workflow is None or not is_command(workflow):
            return await self._run(spec)
        async with self._commands:
            return await self._run(spec)

    async def _run(self, spec: EpisodeSpec) -> Episode:
        try:
            return (await self._pool.ask(spec)).episode
        except CallLost as error:
            return failed_episode(spec, TIMEOUT if error.is_late else WORKER_DIED, str(error))
        except RemoteError as error:
            if error.kind == ChannelClosed.__name__:
                # An engine is gone, not this worker; the supervision of engines reports why.
                raise ChannelClosed(str(error)) from None
            raise

    async def close(self) -> None:
        await self._pool.close()

    async def lost(self, number: int, death: WorkerDied) -> None:
        await self._pool.lost(number, death)
