from contextlib import AbstractAsyncContextManager

from penstock.channel import Channel
from penstock.processes.launchers import Launcher
from tests.processes.launchers.contract import LauncherContract
from tests.processes.launchers.task_launcher import InProcessLauncher


async def serve_nothing(name: str, channel: Channel) -> None:
    await channel.run()


class TestContract(LauncherContract):
    def open_launcher(self) -> AbstractAsyncContextManager[Launcher]:
        return InProcessLauncher(serve_nothing)
