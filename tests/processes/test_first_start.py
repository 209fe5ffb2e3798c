"""Workers die while a run starts: they are started again, as often as later; what the user must mend ends it at once."""

import asyncio
from pathlib import Path

import pytest

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.durability.work_replay import WorkReplay
from penstock.errors import OutOfMemory, UserError, WorkerDied
from penstock.observe.writers.recoveries_jsonl import read_recoveries
from penstock.planner.simulation import SimulatedTokenizer
from penstock.rollout.workflow import load_workflow
from penstock.run.preflight import Prepared
from penstock.run.rollout_workers import start_episodes
from tests.rollout.contract import sevens
from tests.run.scripted_run import LONGEST_S, Kill, ScriptedLauncher, ScriptedRun, ScriptedWorkers

KILLS = [
    *[("trainer", "trainer", where) for where in ("launch", "load", "publish")],
    *[("trainer", "engine0", where) for where in ("last to load", "update", "generate")],
    ("trainer", "scorer0", "load"),
    *[("engine0", "engine0", where) for where in ("launch", "load", "update", "generate")],
    ("engine0", "trainer", "last to load"),
    *[("engine0", "scorer0", where) for where in ("load", "last to load")],
    ("trainer", "scorer0", "last to load"),
    *[("scorer0", "scorer0", where) for where in ("launch", "load")],
]


@pytest.mark.parametrize(("victim", "who", "where"), KILLS)
def test_a_worker_that_dies_while_the_run_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, who: str, where: str
) -> None:
    async def main() -> None:
        workers = ScriptedWorkers(Kill(victim=victim, who=who, where=where))
        run = ScriptedRun(tmp_path, workers, monkeypatch)
        assert (await run.run()).steps == 3
        others = {"trainer", "engine0", "scorer0"} - {victim}
        assert workers.launches == {victim: 2, **dict.fromkeys(others, 1)}
        assert ("trainer", "save") in workers.points
        assert [one.worker for one in read_recoveries(tmp_path)] == [victim]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("victim", "who", "where"), [kill for kill in KILLS if kill[0] == kill[1] and kill[2] != "generate"]
)
def test_a_worker_that_dies_at_each_start_ends_the_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, who: str, where: str
) -> None:
    async def main() -> None:
        workers = ScriptedWorkers(Kill(victim=victim, who=who, where=where, times=99))
        run = ScriptedRun(tmp_path, workers, monkeypatch, run={"restarts": 1})
        with pytest.raises(
            WorkerDied,
            match=rf"^{victim} died 2 times in a row, so the run ends; the last time: worker {victim} ",
        ):
            await run.run()
        assert workers.launches[victim] == 2

    asyncio.run(main())


@pytest.mark.parametrize("where", ["launch", "load"])
def test_a_rollout_worker_that_dies_while_it_starts_is_started_again(tmp_path: Path, where: str) -> None:
    config = build(PenstockConfig, {"rollout": {"workers": 2, "workflow": "tests.rollout.workflows:twice"}})
    prepared = Prepared(
        config=config,
        model="m",
        tokenizer=SimulatedTokenizer(),  # type: ignore[arg-type]
        tasks=[],
        heldout=[],
        folder=tmp_path,
        max_context=64,
        workflow=load_workflow("tests.rollout.workflows:twice"),
    )

    async def main() -> None:
        workers = ScriptedWorkers(Kill(victim="rollout1", who="rollout1", where=where))
        async with asyncio.timeout(LONGEST_S), ScriptedLauncher(workers) as launcher:
            await start_episodes(launcher, prepared, WorkReplay(engine=sevens()))
            assert workers.launches == {"rollout0": 1, "rollout1": 2}

    asyncio.run(main())


@pytest.mark.parametrize("victim", ["trainer", "engine0", "scorer0"])
def test_what_the_user_must_mend_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    async def main() -> None:
        workers = ScriptedWorkers(faults={victim: UserError("there is no model m")})
        with pytest.raises(UserError, match="^there is no model m$"):
            await ScriptedRun(tmp_path, workers, monkeypatch).run()
        assert workers.launches[victim] == 1

    asyncio.run(main())


@pytest.mark.parametrize("victim", ["trainer", "engine0"])
def test_a_worker_without_room_is_started_again_with_less_to_hold_where_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """Who was killed before may still be about to give its memory back."""

    async def main() -> None:
        workers = ScriptedWorkers(faults={victim: OutOfMemory("no room on the GPU")})
        run = ScriptedRun(
            tmp_path, workers, monkeypatch, run={"restarts": 1}, engine={"embedded": {"max_batch": 64}}
        )
        with pytest.raises(WorkerDied) as raised:
            await run.run()
        assert str(raised.value) == (
            f"{victim} died 2 times in a row, so the run ends; the last time: no room on the GPU"
        )
        lowered = (
            "engine0 computes 32 sequences at a time from now on, instead of 64 (engine.embedded.max_batch)"
        )
        assert (lowered in run.view.lines) == (victim == "engine0")
        assert workers.sequences == ([64, 32] if victim == "engine0" else [64])

    asyncio.run(main())


def test_deaths_while_starting_count_with_those_that_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One while it loads and one in the first update are two in a row."""

    async def main() -> None:
        workers = ScriptedWorkers(
            Kill(victim="engine0", who="engine0", where="load"),
            Kill(victim="engine0", who="engine0", where="update"),
        )
        run = ScriptedRun(tmp_path, workers, monkeypatch, run={"restarts": 1})
        with pytest.raises(WorkerDied, match=r"^engine0 died 2 times in a row"):
            await run.run()

    asyncio.run(main())


@pytest.mark.parametrize("ask", ["stop", "cancel"])
def test_a_run_that_is_to_end_while_a_worker_waits_for_its_next_start_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    async def main() -> None:
        workers = ScriptedWorkers(Kill(victim="engine0", who="engine0", where="load", times=99))
        run = ScriptedRun(tmp_path, workers, monkeypatch, run={"restarts": 20})
        running = asyncio.ensure_future(run.run())
        await workers.launched("engine0", 3)
        getattr(run.controlled, ask)()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert workers.launches["engine0"] <= 4

    asyncio.run(main())


@pytest.mark.parametrize(
    ("who", "where"),
    [("trainer", "load"), ("scorer0", "load"), ("engine0", "update"), ("engine0", "generate")],
)
def test_a_run_that_is_stopped_before_it_trains_saves_no_untrained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, where: str
) -> None:
    """Neither waits it for what loads or evaluates: a scheduler kills the job half a minute after its signal."""

    async def main() -> None:
        workers = ScriptedWorkers()
        workers.hang_at = (who, where)
        run = ScriptedRun(tmp_path, workers, monkeypatch)
        running = asyncio.ensure_future(run.run())
        await workers.hangs.wait()
        run.controlled.stop()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ("trainer", "save") not in workers.points
        assert not (tmp_path / "model").exists()

    asyncio.run(main())
