"""Real child processes: they connect, they are watched, and none is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from penstock.channel import Method
from penstock.channel.address import connect, incarnation_name
from penstock.errors import ChannelClosed, RemoteError, UserError, WorkerDied
from penstock.processes.launchers import Launcher
from penstock.processes.launchers.local import LocalLauncher
from penstock.scoring.scoring_process import START_SCORING, ScoringStart
from tests.processes.launchers.contract import LauncherContract, where_it_shows

pytestmark = pytest.mark.processes

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


def test_a_killed_worker_is_reported_with_its_signal_in_less_than_two_seconds(tmp_path: Path) -> None:
    """Engines, trainer ranks, scoring and rollout workers are all watched by `died`."""

    async def main(name: str) -> tuple[float, str]:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            worker = await launcher.launch(name)
            watching = asyncio.create_task(worker.died())
            await asyncio.sleep(0)
            began = asyncio.get_running_loop().time()
            os.kill(worker.pid, signal.SIGKILL)
            death = await watching
            took_s = asyncio.get_running_loop().time() - began
            with pytest.raises(ChannelClosed):
                await worker.channel.call(NOTHING, 1)
            return took_s, str(death)

    for name in ("one", "two", "three"):  # the quickest counts: others share this machine
        took_s, death = asyncio.run(main(name))
        assert f"worker {name}" in death
        assert "was killed by SIGKILL" in death
        if took_s < 2.0:
            break
    assert took_s < 2.0


def test_a_death_is_told_with_its_own_output_alone(tmp_path: Path) -> None:
    """The log is that of a resumed run: an orphan of the run before has left its traceback there."""
    (tmp_path / "one.log").write_text("Traceback (most recent call last):\nConnectionRefusedError\n")

    async def main() -> WorkerDied:
        async with LocalLauncher(tmp_path) as launcher:
            worker = await launcher.launch("one")
            os.kill(worker.pid, signal.SIGKILL)
            return await worker.died()

    assert asyncio.run(main()).detail == ""
    assert "ConnectionRefusedError" in (tmp_path / "one.log").read_text()


def test_a_worker_ends_when_the_controller_vanishes(tmp_path: Path) -> None:
    """The controller is SIGKILLed: its socket closes, and that is all a worker needs."""
    code = (
        "import asyncio, pathlib, sys\n"
        "from penstock.processes.launchers.local import LocalLauncher\n"
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
    wait_until_removed(folder)


def test_a_stranger_without_the_token_is_turned_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            with pytest.raises(UserError, match="the token is not the run's"):
                await connect(launcher._listener.address, "one", "guess")

    asyncio.run(main())


def test_no_process_shows_the_token(tmp_path: Path) -> None:
    """Neither a worker, nor what its code starts, nor the keeper."""

    async def main() -> list[str]:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            await start_scoring(launcher, tmp_path, "")
            return where_it_shows(launcher._token)

    assert asyncio.run(main()) == []


def wait_until_removed(folder: Path) -> None:
    """The worker, or else the keeper, removes it a moment after the controller is gone."""
    for _ in range(500):
        if not folder.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} is still there")


def gone(*pids: int) -> bool:
    """Whether all have ended within some seconds."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, 20)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_to_a_worker_are_left_to_the_controller(tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            worker = await launcher.launch("one")
            os.kill(worker.pid, number)
            with pytest.raises(RemoteError):
                await worker.channel.call(NOTHING, 1)

    asyncio.run(main())


def test_a_signal_while_a_worker_starts_does_not_end_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            launching = asyncio.create_task(launcher.launch("one"))
            while not (children := find_workers()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            for _ in range(20):
                for child in children:
                    child.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.01)
            with pytest.raises(RemoteError):
                await (await launching).channel.call(NOTHING, 1)

    asyncio.run(main())


def find_workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "penstock.worker" in child.cmdline()]


START_REWARD = """
import subprocess, sys, time, os, re, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
if os.environ["HOLD"] == "gil":
    re.match(r"(a|a)+$", "a" * 60 + "b")
if os.environ["HOLD"] == "import":
    time.sleep(600)
def reward(task, completion):
    return 1.0
"""


async def start_scoring(launcher: LocalLauncher, folder: Path, hold: str) -> tuple[int, int]:
    """A scorer whose module starts a process; it and its process."""
    module, pids = folder / "holds.py", folder / "pids"
    module.write_text(START_REWARD)
    worker = await launcher.launch("scorer0", environment={"PIDS": str(pids), "HOLD": hold})
    start = ScoringStart(reward={"functions": [f"{module}:reward"]}, search_path=())
    calling = asyncio.create_task(worker.channel.call(START_SCORING, start))
    while not (pids.exists() and pids.read_text()):  # noqa: ASYNC110 (another process writes it)
        await asyncio.sleep(0.01)
    if not hold:
        await calling
    else:
        calling.add_done_callback(lambda task: task.cancelled() or task.exception())
    scorer, child = map(int, pids.read_text().split())
    return scorer, child


@pytest.mark.parametrize("hold", ["", "import"])
def test_what_a_workers_code_started_goes_with_the_launcher(tmp_path: Path, hold: str) -> None:
    async def main() -> tuple[int, int]:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            return await start_scoring(launcher, tmp_path, hold)

    assert gone(*asyncio.run(main()))


def test_what_a_workers_code_started_goes_when_the_worker_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            pids = await start_scoring(launcher, tmp_path, "")
            (worker,) = launcher._workers
            await worker.kill()
            assert gone(*pids)

    asyncio.run(main())


CONTROLLER = """
import asyncio, pathlib, sys
from penstock.processes.launchers.local import LocalLauncher
from tests.processes.launchers.test_local import start_scoring
async def main():
    folder = pathlib.Path(sys.argv[1])
    async with LocalLauncher(folder / "logs") as launcher:
        pids = await start_scoring(launcher, folder, sys.argv[2])
        print(*pids, launcher.folder, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("hold", ["", "gil", "import"])
def test_nothing_outlives_a_killed_controller(tmp_path: Path, hold: str) -> None:
    root = Path(__file__).parents[3]
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path), hold], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert controller.stdout is not None
    scorer, child, folder = controller.stdout.readline().split()
    controller.kill()
    controller.wait()
    controller.stdout.close()
    assert gone(int(scorer), int(child))
    wait_until_removed(Path(folder))


def test_a_stray_write_into_a_workers_socket_ends_that_worker_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            other = await launcher.launch("one")
            stray = await connect(launcher._listener.address, "none", launcher._token)
            stray._writer.write(b"stray words")
            worker = await launcher.launch("two")
            worker.channel._reader.feed_data(b"\x00\x00\x00\x05stray")
            assert "exit code 0" in str(await worker.died())
            assert launcher.folder.is_dir()
            with pytest.raises(RemoteError):
                await other.channel.call(NOTHING, 1)
            await stray.close()

    asyncio.run(main())


def test_of_what_user_code_prints_a_log_keeps_the_beginning(tmp_path: Path) -> None:
    module = tmp_path / "prints.py"
    module.write_text(
        "for _ in range(60): print('x' * 100_000)\ndef reward(task, completion):\n    return 1.0\n"
    )

    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            worker = await launcher.launch("scorer0")
            start = ScoringStart(reward={"functions": [f"{module}:reward"]}, search_path=())
            await worker.channel.call(START_SCORING, start)

    asyncio.run(main())
    log = (tmp_path / "logs" / "scorer0.log").read_text()
    assert 4_000_000 < len(log) < 4_300_000
    assert log.endswith("[further output is left out]\n")
    assert (tmp_path / "logs" / "scorer0.log").stat().st_mode & 0o777 == 0o600


def test_a_process_that_was_given_up_cant_arrive_in_the_place_of_its_successor(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalLauncher(tmp_path / "logs") as launcher:
            first = await launcher.launch("one")
            await first.kill()
            launcher.forget(first)
            launching = asyncio.create_task(launcher.launch("one"))
            old = await connect(launcher._listener.address, incarnation_name("one", 1), launcher._token)
            await old.run()  # it is closed at once
            second = await launching
            with pytest.raises(RemoteError):
                await second.channel.call(NOTHING, 1)

    asyncio.run(main())


def test_a_worker_writes_its_stacks_into_its_log_and_goes_on(tmp_path: Path) -> None:
    def written(log: str) -> bool:
        return "__main__.py" in Path(log).read_text()

    async def main() -> None:
        async with asyncio.timeout(60), LocalLauncher(tmp_path / "logs") as launcher:
            worker = await launcher.launch("one")
            log = worker.write_stacks()
            assert log is not None
            while not written(log):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(RemoteError):
                await worker.channel.call(NOTHING, 1)

    asyncio.run(main())
