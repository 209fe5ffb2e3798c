"""Workers in replaceable processes: one dies, comes back under its name, and the pool goes on; what a reward may use."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.engines.engine_pool import EnginePool
from penstock.errors import ChannelClosed, ScoringFailed
from penstock.processes.launchers.config import LauncherConfig
from penstock.processes.launchers.local import LocalLauncher
from penstock.records import Task
from penstock.run.workers import LaunchedEngine, start_scorers, sync_section
from penstock.sync.config import SyncConfig
from tests.engines.contract import ask, collect, joined, update_to
from tests.processes.launchers.task_launcher import InProcessLauncher
from tests.run.scripted_worker import place, serve_scripted
from tests.scoring.groups import a_group


def test_an_engine_that_died_comes_back_and_is_brought_up_to_date() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), InProcessLauncher(serve_scripted) as launcher:
            engines = [LaunchedEngine(place(launcher, name)) for name in ("engine0", "engine1")]
            for engine in engines:
                await engine.place.start()
            pool = EnginePool({engine.name: engine.calls for engine in engines})
            await pool.update(update_to(4))
            lost = engines[1]
            await lost.place._worker.kill()  # type: ignore[union-attr]
            with pytest.raises(ChannelClosed):
                await lost.calls.report()
            pool.leave("engine1")
            assert joined(await collect(pool.generate(ask("a")))) == [0, 1, 2, 3, 4]
            await lost.place.restart()
            assert (lost.place.incarnation, (await lost.calls.report()).versions) == (2, {"policy": -1})
            await pool.join("engine1", lost.calls, update_to(4))
            assert [report.versions for report in await pool.reports()] == [{"policy": 4}] * 2

    asyncio.run(main())


def spins(task: Task, completion: str) -> float:
    while True:
        pass


def takes_memory(task: Task, completion: str) -> float:
    return float(len(bytearray(3 * 10**9)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reward", "reason", "said"),
    [
        ("spins", "score_worker_died", r"was killed by SIGXCPU: it used more CPU time than its call may"),
        ("takes_memory", "score_error", r"raised MemoryError"),
    ],
)
def test_a_reward_past_its_limits_costs_its_group(
    tmp_path: Path, reward: str, reason: str, said: str
) -> None:
    section = {"functions": f"{__name__}:{reward}", "cpu_s": 1.0, "memory_gb": 2.0, "timeout_s": 60.0}
    config = build(PenstockConfig, {"reward": section})
    prepared: Any = SimpleNamespace(config=config, gpus=())

    async def main() -> None:
        async with LocalLauncher(tmp_path) as launcher:
            pool = await start_scorers(launcher, prepared)
            with pytest.raises(ScoringFailed, match=said) as raised:
                await pool.score(a_group("1"))
            assert raised.value.reason == reason

    asyncio.run(main())


def test_a_trainer_serves_weights_where_engines_of_other_machines_come_in() -> None:
    def told(listen: str, kind: str = "local", **sync: str) -> SyncConfig:
        launcher = LauncherConfig(kind=kind, listen=listen, token_file="token")
        return sync_section(SyncConfig(**{"transport": "http", **sync}), launcher, Path("/runs/a"))

    assert told("10.1.2.3:7000").interface == "10.1.2.3"
    assert told("127.0.0.1:7000").interface == ""
    assert told("10.1.2.3:7000", kind="ray").interface == ""
    assert told("10.1.2.3:7000", interface="eth0").interface == "eth0"
    assert told("10.1.2.3:7000", transport="collective").interface == ""


def test_files_for_other_machines_go_to_the_run_folder() -> None:
    def folder(launcher: LauncherConfig, **sync: str) -> str:
        return sync_section(SyncConfig(transport="filesystem", **sync), launcher, Path("/runs/a")).folder

    assert folder(LauncherConfig(kind="ray")) == "/runs/a/weights"
    assert folder(LauncherConfig(listen="127.0.0.1:0", token_file="token")) == "/runs/a/weights"
    assert folder(LauncherConfig(kind="ray"), folder="/shared") == "/shared"
    assert folder(LauncherConfig()) == ""
