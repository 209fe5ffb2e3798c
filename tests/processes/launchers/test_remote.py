"""Node agents as child processes of this machine: the launcher contract, files, logs, and nodes that fall silent."""

import asyncio
import os
import re
import secrets
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from penstock.channel import Method
from penstock.channel.address import connect
from penstock.channel.token_pipe import token_pipe
from penstock.errors import ChannelClosed, RemoteError, UserError, WorkerDied
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.remote import Placed, RemoteLauncher
from penstock.processes.launchers.user_files import gather
from penstock.scoring.scoring_process import START_SCORING, ScoringStart
from tests.processes.launchers.contract import LauncherContract, where_it_shows

pytestmark = pytest.mark.processes

NOTHING = Method("nothing.such", int, int)
TOKEN = "a token of the test"


class AgentProcess:
    """`remote.Placed`: an agent that is a child of this process."""

    channel = None
    is_avoided = False

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def failed(self) -> str:
        _, errors = await self.process.communicate()
        return errors.decode()

    def avoid(self) -> None:
        self.is_avoided = True

    async def remove(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class AgentProcesses:
    """`remote.Placer` on this machine. `token` is what the agents bring."""

    def __init__(self, token: str = TOKEN) -> None:
        self.agents: list[AgentProcess] = []
        self._token = token

    async def place(self, name: str, incarnation: int, *, address: str, token: str, threads: int) -> Placed:
        with token_pipe(self._token) as stdin:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.worker.node_agent", "--connect", address),
                *("--name", name, "--incarnation", str(incarnation)),
                stderr=asyncio.subprocess.PIPE,
                stdin=stdin,
                env={**os.environ, "RAY_AUTH_TOKEN": "the cluster's"},
            )
        self.agents.append(AgentProcess(process))
        return self.agents[-1]

    async def close(self) -> None:
        for agent in self.agents:
            await agent.remove()


def open_remote(
    folder: Path, placer: AgentProcesses | None = None, *, token: str = TOKEN, **options: object
) -> RemoteLauncher:
    placer = placer or AgentProcesses()
    return RemoteLauncher(
        folder / "logs",
        placer,
        address="tcp:127.0.0.1:0",
        token=token,
        blobs=folder / "blobs",
        **options,  # type: ignore[arg-type]
    )


class TestContract(LauncherContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open_launcher(self) -> AbstractAsyncContextManager[Launcher]:
        return open_remote(self.path)


def test_a_worker_gets_the_users_files_and_its_output_comes_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "reward.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "print('loaded in', Path.cwd().name, [name for name in os.environ if name.startswith('RAY_')], flush=True)\n"
        "def one(task, completion):\n    return 1.0\n"
    )

    async def main() -> str:
        files = gather(home, [], max_mb=1.0)
        async with asyncio.timeout(60), open_remote(tmp_path, files=files) as launcher:
            worker = await launcher.launch("one")
            start = ScoringStart(
                reward={"functions": [{"path": f"{home}/reward.py:one"}]}, search_path=(str(home),)
            )
            (home / "reward.py").unlink()  # what the worker loads is its own copy
            await worker.channel.call(START_SCORING, start)
            await worker.kill()
            return (tmp_path / "logs" / "one.log").read_text()

    assert asyncio.run(main()) == "loaded in 0 []\n"


def test_an_end_is_told_with_signal_host_and_last_lines(tmp_path: Path) -> None:
    async def main() -> WorkerDied:
        placer = AgentProcesses()
        async with asyncio.timeout(60), open_remote(tmp_path, placer) as launcher:
            worker = await launcher.launch("one")
            children = psutil.Process(placer.agents[0].process.pid).children()
            process = next(one for one in children if "penstock.worker" in one.cmdline())
            os.kill(process.pid, signal.SIGUSR1)  # it writes its stacks
            log = tmp_path / "logs" / "one.log"
            while not (log.exists() and "most recent call first" in log.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(ChannelClosed):
                await worker.channel.call(NOTHING, 1)
            return await worker.died()

    death = asyncio.run(main())
    assert "worker one (pid " in str(death)
    assert f"on {os.uname().nodename}) was killed by SIGKILL" in str(death)
    assert "most recent call first" in death.detail


@pytest.mark.full
def test_a_silent_node_is_lost_in_less_than_five_seconds_and_its_worker_cannot_come_back(
    tmp_path: Path,
) -> None:
    async def main() -> tuple[WorkerDied, list[psutil.Process]]:
        placer = AgentProcesses()
        async with asyncio.timeout(60), open_remote(tmp_path, placer) as launcher:
            worker = await launcher.launch("one")
            agent = psutil.Process(placer.agents[0].process.pid)
            family = [agent, *agent.children(recursive=True)]
            for process in family:
                process.suspend()  # as a node that is cut off
            with pytest.raises(ChannelClosed):
                await worker.channel.call(NOTHING, 1)
            death = await worker.died()
            await worker.kill()
            assert placer.agents[0].is_avoided
            launcher.forget(worker)
            second = await launcher.launch("one")
            for process in family:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    process.resume()
            with pytest.raises(RemoteError):
                await second.channel.call(NOTHING, 1)
            return death, family

    death, family = asyncio.run(main())
    told = re.search(r"its node has not answered for ([\d.]+) s", str(death))
    assert told is not None
    assert 3.5 <= float(told[1]) < 5.0  # by its clock, which leaves out what this machine was late
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_no_process_shows_the_token(tmp_path: Path) -> None:
    token = secrets.token_hex(16)

    async def main() -> list[str]:
        placer = AgentProcesses(token)
        async with asyncio.timeout(60), open_remote(tmp_path, placer, token=token) as launcher:
            await launcher.launch("one")
            return where_it_shows(token)

    assert asyncio.run(main()) == []


def test_without_the_token_no_agent_is_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_remote(tmp_path) as launcher:
            with pytest.raises(
                UserError, match="refused this worker: the token is not the run's; bring the one"
            ):
                await connect(launcher.address, "agent/one.1", "another")

    asyncio.run(main())


def test_an_agent_that_does_not_reach_the_controller_says_so(tmp_path: Path) -> None:
    class Astray(AgentProcesses):
        async def place(
            self, name: str, incarnation: int, *, address: str, token: str, threads: int
        ) -> Placed:
            return await super().place(name, incarnation, address="tcp:127.0.0.1:1", token=token, threads=1)

    async def main() -> None:
        async with asyncio.timeout(60), open_remote(tmp_path, Astray()) as launcher:
            message = r"can't reach the controller at 127\.0\.0\.1:1: Connection refused; .*launcher\.listen"
            with pytest.raises(WorkerDied, match=message):
                await launcher.launch("one")

    asyncio.run(main())


def test_a_trainer_must_see_the_run_folder(tmp_path: Path) -> None:
    async def main() -> None:
        placer = AgentProcesses()
        launcher = RemoteLauncher(
            tmp_path / "logs",
            placer,
            address="tcp:127.0.0.1:0",
            token=TOKEN,
            blobs=tmp_path / "elsewhere" / "blobs",
        )
        async with asyncio.timeout(60), launcher:
            with pytest.raises(UserError, match=r"does not see .*/elsewhere; set run\.folder"):
                await launcher.launch("trainer")
            await launcher.launch("engine0")

    asyncio.run(main())
