import asyncio
from pathlib import Path

import pytest

from penstock.cli.doctor import diagnose
from penstock.durability.durable_log import FOLDER, open_log
from penstock.loop.attempt_records import GroupDropped, GroupsTrained
from penstock.observe.writers.recoveries_jsonl import RecoveriesWriter
from penstock.run.monitor import write_standing
from penstock.run.run_folder import held
from tests.loop.test_attempts import admitted, finished
from tests.observe.examples import ONE_OF_EACH
from tests.run.simulated_run import SimulatedRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedRun:
    played = SimulatedRun(tmp_path, monkeypatch, run={"steps": 6, "checkpoint_every": 3, "journal": True})
    played.play(lambda run: asyncio.sleep(0))
    return played


def test_a_run_that_has_done_its_steps_has_nothing_wrong(run: SimulatedRun) -> None:
    lines = list(diagnose(str(run.folder)))
    assert lines[0] == f"{run.folder}: has made all of its steps"
    assert lines[1].startswith("step 6, ")
    assert lines[1].endswith("checkpoints of steps 3, 6")
    assert lines[2:] == ["groups: 12 trained", "nothing looks wrong from here"]


def test_a_run_that_was_killed_is_told_its_last_words_and_how_to_go_on(run: SimulatedRun) -> None:
    (run.folder / "summary.json").unlink()
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "trainer.log").write_text("Traceback\nMemoryError\n")
    writer = RecoveriesWriter(run.folder)
    for event in ONE_OF_EACH:
        writer.on(event)
    lines = list(diagnose(str(run.folder)))
    assert lines[0].startswith(f"{run.folder}: has ended without a summary")
    assert "lost and replaced: engine0 1 times; the last time: it was killed" in lines
    assert lines[-4:] == [
        "trainer said last:",
        "    Traceback",
        "    MemoryError",
        f"`penstock resume {run.folder}` resumes from step 6",
    ]


def test_a_run_without_summary_and_checkpoints_is_not_called_healthy(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    lines = list(diagnose(str(tmp_path)))
    assert lines[0] == (
        f"{tmp_path}: has ended without a summary: it was killed, or failed with an error that it printed"
    )
    assert lines[1].endswith("no checkpoints")
    assert len(lines) == 2


def test_a_run_that_was_stopped_is_told_how_to_go_on(run: SimulatedRun) -> None:
    summary = run.folder / "summary.json"
    summary.write_text(summary.read_text().replace('"stopped_early": false', '"stopped_early": true'))
    lines = list(diagnose(str(run.folder)))
    assert lines[0] == f"{run.folder}: was stopped, and saved its model"
    assert lines[-1] == f"`penstock resume {run.folder}` resumes from step 6"


def test_a_run_that_goes_on_without_a_trainer_is_told_so(run: SimulatedRun) -> None:
    with held(run.folder):
        lines = list(diagnose(str(run.folder)))
    assert lines[0] == f"{run.folder}: is running"
    assert "there is no trainer now: the run starts, or starts another one" in lines


def test_a_run_that_was_killed_says_where_it_stood(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    write_standing(tmp_path, ["trainer – waiting for groups", "groups: 2 in generation"])
    lines = list(diagnose(str(tmp_path)))
    at = lines.index("    trainer – waiting for groups")
    assert lines[at - 1].endswith(" s ago:")
    assert lines[at + 1] == "    groups: 2 in generation"


def test_groups_are_counted_with_the_oldest_that_wait_and_drops_by_reason(tmp_path: Path) -> None:
    async def scene() -> None:
        async with open_log(tmp_path / FOLDER) as log:
            for number in range(4):
                await log.append(admitted(number))
            for number in (1, 2):
                await log.append(finished(number))
            await log.append(GroupsTrained(step=1, numbers=(1,)))
            await log.append(GroupDropped(number=0, reason="refused"))

    asyncio.run(scene())
    lines = list(diagnose(str(tmp_path)))
    at = lines.index("groups: 1 issued, 1 scored, 1 trained, 1 dropped")
    assert lines[at + 1 : at + 4] == [
        "    the oldest issued: group 3 (task t3)",
        "    the oldest scored: group 2 (task t2)",
        "    1 dropped for refused",
    ]
