"""Workers of this process that become scripted engines when they are told to."""

from penstock.channel import Channel, serve
from penstock.engines.engine_start import START_ENGINE, EngineStart
from penstock.engines.scripted import ScriptedEngine
from penstock.processes.replaceable import ReplaceableWorker
from penstock.records import EngineReport
from penstock.records.interfaces import Engine
from tests.processes.launchers.task_launcher import InProcessLauncher


async def serve_scripted(name: str, channel: Channel) -> None:
    """A worker that becomes a scripted engine when it is told to; `broken` ends instead."""

    async def start(request: EngineStart) -> EngineReport:
        if request.model == "broken":
            await channel.close()
        engine = ScriptedEngine(lambda request: range(5), name=request.name, version=-1)
        serve(Engine, engine, channel)
        return await engine.report()

    channel.serve(START_ENGINE, start)
    await channel.run()


def place(launcher: InProcessLauncher, name: str, model: str = "m") -> ReplaceableWorker:
    start = EngineStart(name=name, model=model, device="cpu", threads=1, config={}, blobs="")
    return ReplaceableWorker(launcher, name, start=lambda channel: channel.call(START_ENGINE, start))
