"""Real child processes: they connect, they are watched, and none is left behind."""

import asyncio
import os
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from penstock.channel import Method
from penstock.channel.address import Hello, connect
from penstock.errors import ChannelClosed, RemoteError, WorkerDied
from penstock.orchestration.launchers import Launcher
from penstock.orchestration.launchers.local import LocalLauncher
from tests.orchestration.launchers.contract import LauncherContract

NOTHING = Method("nothing.such", int, int)


class TestContract(LauncherContract):
    @pytest.fixture(autouse=True)
    def _logs(self, tmp_path: Path) -> None:
        self.logs = tmp_path / "logs"

    def open_launcher(self) -> AbstractAsyncContextManager[Launcher]:
        return LocalLauncher(self.logs)


def test_a_worker_connects_and_ends_with_the_launcher(tmp_path: Path) -> None:
    async def main() -> tuple[int, Path]:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            worker = await launcher.launch("one")
            with pytest.raises(RemoteError, match=r"no such method: nothing\.such"):
                await worker.channel.call(NOTHING, 1)
            return worker.pid, launcher.folder

    pid, folder = asyncio.run(main())
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


def test_a_killed_worker_is_reported_with_its_signal(tmp_path: Path) -> None:
    async def main() -> WorkerDied:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            worker = await launcher.launch("one")
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(ChannelClosed):
                await worker.channel.call(NOTHING, 1)
            return await worker.died()

    assert "worker one" in str(asyncio.run(main()))
    assert "was killed by SIGKILL" in str(asyncio.run(main()))


def test_a_worker_ends_when_the_controller_vanishes(tmp_path: Path) -> None:
    """The controller is SIGKILLed: its socket closes, and that is all a worker needs."""
    code = (
        "import asyncio, pathlib, sys\n"
        "from penstock.orchestration.launchers.local import LocalLauncher\n"
        "async def main():\n"
        "    async with LocalLauncher(pathlib.Path(sys.argv[1])) as launcher:\n"
        "        worker = await launcher.launch('one')\n"
        "        print(worker.pid, launcher.folder, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )

    async def main() -> tuple[int, Path]:
        controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, str(tmp_path)), stdout=asyncio.subprocess.PIPE
        )
        assert controller.stdout is not None
        pid, folder = (await controller.stdout.readline()).decode().split()
        worker = psutil.Process(int(pid))
        controller.kill()
        await controller.wait()
        await asyncio.to_thread(psutil.wait_procs, [worker], 10)
        return int(pid), Path(folder)

    pid, folder = asyncio.run(main())
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


def test_a_stranger_without_the_token_is_turned_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            stranger = await connect(launcher._listener.address, Hello(name="one", token="guess"))
            reading = asyncio.create_task(stranger.run())
            with pytest.raises(ChannelClosed):
                await stranger.call(NOTHING, 1)
            await reading

    asyncio.run(main())
