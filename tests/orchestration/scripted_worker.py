"""Workers of this process that become scripted engines when they are told to."""

from penstock.channel import Channel
from penstock.engines.engine_client import (
    GENERATE,
    REPORT,
    STAGE,
    START_ENGINE,
    UPDATE,
    EngineClient,
    EngineStart,
)
from penstock.engines.scripted import ScriptedEngine
from penstock.orchestration.replaceable import ReplaceableWorker
from penstock.types import EngineReport
from tests.orchestration.launchers.task_launcher import InProcessLauncher


async def serve_scripted(name: str, channel: Channel) -> None:
    """A worker that becomes a scripted engine when it is told to; `broken` ends instead."""

    async def start(request: EngineStart) -> EngineReport:
        if request.model == "broken":
            await channel.close()
        engine = ScriptedEngine(lambda request: range(5), name=request.name, version=-1)
        channel.serve_stream(GENERATE, engine.generate)
        channel.serve(REPORT, lambda _: engine.report())
        channel.serve(STAGE, engine.stage)
        channel.serve(UPDATE, lambda request: engine.update(request.update, request.interrupt))
        return await engine.report()

    channel.serve(START_ENGINE, start)
    await channel.run()


def place(launcher: InProcessLauncher, name: str, model: str = "m") -> ReplaceableWorker[EngineClient]:
    start = EngineStart(name=name, model=model, device="cpu", threads=1, config={}, blobs="")
    return ReplaceableWorker(launcher, name, connect=EngineClient, start=lambda client: client.start(start))
