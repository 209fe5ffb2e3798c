"""The process that runs workflows, without its process: both ends of its channel on one loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.channel import Channel
from penstock.engines.engine_client import GENERATE
from penstock.engines.scripted import ScriptedEngine
from penstock.observe.event_queue import EventQueue
from penstock.observe.events import Span
from penstock.rollout.episode_pool import EpisodePool
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.rollout_client import Outcome, RolloutClient, RolloutStart
from penstock.worker.rollout_role import start
from tests.rollout.contract import EpisodeRunnerContract


class ChannelWorker:
    """`EpisodeWorker` over a channel whose other end is in this process too."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client

    async def run(self, spec: EpisodeSpec) -> Outcome:
        return await self._client.run(spec)

    async def end(self) -> None:
        raise NotImplementedError

    async def restart(self) -> None:
        raise NotImplementedError


class TestRolloutRole(EpisodeRunnerContract):
    @asynccontextmanager
    async def runner(self, engine: ScriptedEngine, model: Path) -> AsyncIterator[EpisodeRunner]:
        ends = [Channel(*await asyncio.open_connection(sock=end)) for end in socket.socketpair()]
        reading = [asyncio.create_task(end.run()) for end in ends]
        controller, worker = ends
        controller.serve_stream(GENERATE, engine.generate)
        request = RolloutStart(model=str(model), workflow=None, search_path=())
        queue = EventQueue()
        await start(worker, request, lambda error: None, queue.of("rollout0"))
        try:
            yield EpisodePool([ChannelWorker(RolloutClient(controller))], capacity=8)
        finally:
            for end in ends:
                await end.close()
            await asyncio.gather(*reading)
        spans = [event for event in queue.take().events if isinstance(event, Span)]
        assert spans
        assert {(span.track.split()[0], span.name) for span in spans} == {("episode", "episode")}
