"""Where workflows run: in the controller, or in worker processes that can be replaced."""

import asyncio
import sys
from pathlib import Path

from penstock.channel import Channel
from penstock.engines.engine_client import GENERATE
from penstock.errors import ChannelClosed
from penstock.interfaces import Engine
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.replaceable import ReplaceableWorker
from penstock.rollout.episode_pool import EpisodePool
from penstock.rollout.episode_runner import EpisodeRunner, LocalEpisodes
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_client import EngineGone, Outcome, RolloutClient, RolloutStart


async def start_episodes(launcher: Launcher, prepared: Prepared, engine: Engine) -> EpisodeRunner:
    """Worker processes where `rollout.workers` asks for them and there is code of the user's that they can load."""
    rollout = prepared.config.rollout
    if rollout.workers == 0 or not _is_loadable(prepared):
        return LocalEpisodes(engine, prepared.tokenizer, prepared.workflow)
    places = [
        rollout_place(launcher, f"rollout{index}", prepared, engine) for index in range(rollout.workers)
    ]
    await asyncio.gather(*(place.start() for place in places))
    return EpisodePool([LaunchedRollouts(place) for place in places], capacity=rollout.episodes_per_worker)


def _is_loadable(prepared: Prepared) -> bool:
    """Whether the run or a task names a workflow, and none is there that has no name."""
    if prepared.workflow is not None:
        return prepared.config.rollout.workflow is not None
    return any(task.workflow is not None for task in (*prepared.tasks, *prepared.heldout))


class LaunchedRollouts:
    """`penstock.rollout.episode_pool.EpisodeWorker` in a process that can be replaced."""

    def __init__(self, place: ReplaceableWorker[RolloutClient]) -> None:
        self.place = place

    async def run(self, spec: EpisodeSpec) -> Outcome:
        try:
            return await self.place.client.run(spec)
        except EngineGone:
            raise
        except ChannelClosed:
            raise await self.place.died() from None

    async def end(self) -> None:
        await self.place.end()

    async def restart(self) -> None:
        await self.place.restart()


def rollout_place(
    launcher: Launcher, name: str, prepared: Prepared, engine: Engine
) -> ReplaceableWorker[RolloutClient]:
    """Its episodes ask for turns over the channel that it is reached by: both sides serve."""
    start = RolloutStart(
        model=prepared.model,
        trust_remote_code=prepared.config.model.trust_remote_code,
        template_args=prepared.config.tasks.template_args,
        workflow=prepared.config.rollout.workflow,
        search_path=(str(Path.cwd()), *(entry for entry in sys.path if entry)),
    )

    def connect(channel: Channel) -> RolloutClient:
        channel.serve_stream(GENERATE, engine.generate)
        return RolloutClient(channel)

    return ReplaceableWorker(launcher, name, connect=connect, start=lambda client: client.start(start))
