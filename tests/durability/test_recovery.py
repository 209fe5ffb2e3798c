"""A run that crashes at random moments trains on every group once, and generates none that was finished again."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.crashes.crash_audit import audit, audit_returned, naming, naming_await
from benchmarks.crashes.crash_truth import audit_acknowledged
from benchmarks.crashes.crash_world import CrashWorld
from penstock.blob_stores import MemoryBlobs
from penstock.config.root import PenstockConfig
from penstock.durability.checkpoints import Progress
from penstock.durability.durable_log import open_log, read_attempts
from penstock.durability.journal.journal_files import DiskFiles
from penstock.durability.recovery import put_aside_other_history, recover
from penstock.loop.admission import Ticket
from penstock.loop.attempt_records import (
    CheckpointKept,
    GroupAdmitted,
    GroupDropped,
    GroupsTrained,
    VersionIssued,
    scored_record,
)
from penstock.loop.attempts import Attempts
from penstock.loop.history import HistoryState
from penstock.records import Task
from penstock.tasks.stream import TaskStream
from tests.durability.test_blob_copies import group_with_blob
from tests.loop.test_admission import scored


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`--seeds` schedules from `--first-seed` on, a few in each test."""
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--first-seed"), metafunc.config.getoption("--seeds")
        last = first + count
        metafunc.parametrize(
            "seeds", [range(start, min(start + 20, last)) for start in range(first, last, 20)]
        )


def test_every_group_is_trained_once_through_any_crash(
    seeds: range, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    crashes, again, sampled = 0, 0, 0
    for seed in seeds:
        with naming(seed):
            world = CrashWorld(seed, tmp_path / str(seed))
            world.play()
            audit(world)
        crashes += world.crashes
        again, sampled = again + world.truth.num_again, sampled + len(world.truth.tokens)
    assert crashes >= len(seeds)
    record_property("regenerated_fraction", again / sampled)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 3])
def test_nothing_is_lost_whatever_await_a_run_crashes_at(seed: int, tmp_path: Path) -> None:
    """A short run is played once, and then again for every await in it, with a crash there."""
    undisturbed = CrashWorld(seed, tmp_path / "undisturbed", steps=2, small=True)
    undisturbed.play()
    assert undisturbed.num_awaits > 100
    for crash_at in range(undisturbed.num_awaits):
        with naming_await(seed, crash_at):
            world = CrashWorld(seed, tmp_path / str(crash_at), steps=2, small=True, crash_at=crash_at)
            world.play()
            assert world.crashes == 1
            audit(world)


def test_a_journal_that_the_run_went_on_without_is_put_aside(tmp_path: Path) -> None:
    async def scene() -> None:
        async with open_log(tmp_path / "journal") as log:
            await log.append(
                GroupAdmitted(
                    ticket=Ticket(number=0, bound=1, deadline=1), task_id="t", prompt="p", num_taken=1
                )
            )
            await log.append(scored_record(0, scored(0, [0]), None))
            await log.append(GroupsTrained(step=4, numbers=(0,)))

    asyncio.run(scene())
    assert not put_aside_other_history(tmp_path / "none", 4)
    assert not put_aside_other_history(tmp_path / "journal", 4)
    assert (tmp_path / "journal").exists()
    asyncio.run(keep_from(tmp_path / "journal", 4))
    assert not put_aside_other_history(tmp_path / "journal", 4)
    shutil.copytree(tmp_path / "journal", tmp_path / "copy")
    shutil.copytree(tmp_path / "journal", tmp_path / "third")
    again = "Groups under way are generated again; the journal is now journal.undone-"
    assert put_aside_other_history(tmp_path / "journal", 3) == (
        f"the journal has no groups from before step 4, and the checkpoint is of step 3. {again}1"
    )
    (tmp_path / "copy").rename(tmp_path / "journal")
    assert put_aside_other_history(tmp_path / "journal", 5) == (
        "the journal ends at step 4 and the checkpoint is of step 5: its end was lost, or the run continued "
        f"without it. {again}2"
    )
    assert not (tmp_path / "journal").exists()
    (tmp_path / "third").rename(tmp_path / "journal")
    assert put_aside_other_history(tmp_path / "journal", None) == f"the run keeps no journal now. {again}3"
    assert read_attempts(DiskFiles(tmp_path / "journal.undone-1")).standing.step == 4


async def keep_from(folder: Path, step: int) -> None:
    """As a checkpoint does when it is durable."""
    async with open_log(folder) as log:
        await log.append(CheckpointKept(step=step))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ([(1, "t0", 1)], None),
        ([(1, "t1", 2)], "task 't0' was put back and passed over"),
        ([(1, "t5", 1)], "'t5' came before 't0'"),
    ],
)
def test_a_task_that_was_put_back_and_forgotten_is_a_violation(
    later: list[tuple[int, str, int]], message: str | None
) -> None:
    def admitted(number: int, task_id: str, num_taken: int) -> GroupAdmitted:
        ticket = Ticket(number=number, bound=1, deadline=1)
        return GroupAdmitted(ticket=ticket, task_id=task_id, prompt="p", num_taken=num_taken)

    dropped = GroupDropped(number=0, reason="stale", returns="t0")
    records = [admitted(0, "t0", 1), dropped, *(admitted(*one) for one in later)]
    with pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext():
        audit_returned(records)


def test_a_task_that_was_put_back_before_a_crash_comes_first_after_it(tmp_path: Path) -> None:
    tasks = [Task(id=f"t{number}", prompt="p") for number in range(5)]
    stream = TaskStream(tasks, shuffle=False)
    progress = beginning(stream)

    async def scene() -> list[str]:
        async with open_log(tmp_path / "journal") as log:
            log.append(VersionIssued(version=0, step=0))
            for number in range(3):
                ticket = Ticket(number=number, bound=1, deadline=1)
                await log.append(
                    GroupAdmitted(
                        ticket=ticket,
                        task_id=tasks[number].id,
                        prompt=tasks[number].prompt,
                        num_taken=number + 1,
                    )
                )
                await log.append(scored_record(ticket.number, scored(number, [0]), None))
            await log.append(GroupDropped(number=1, reason="stale", returns="t1"))
            await log.append(GroupDropped(number=2, reason="empty"))
        async with open_log(tmp_path / "journal") as log:
            config = PenstockConfig.model_validate({})
            resume = await recover(log, progress, config, stream)
        assert [group.ticket.number for group in resume.gate.ready] == [0]
        return [stream.next().id for _ in range(3)]

    assert asyncio.run(scene()) == ["t1", "t3", "t4"]


def test_a_group_whose_drop_a_crash_lost_is_to_be_dropped_again(tmp_path: Path) -> None:
    """It has no token to train on: the buffer drops it once it is on the disk."""
    stream = TaskStream([Task(id="t0", prompt="p")], shuffle=False)
    ticket = Ticket(number=0, bound=1, deadline=1)

    async def scene() -> None:
        async with open_log(tmp_path / "journal") as log:
            log.append(VersionIssued(version=0, step=0))
            await log.append(GroupAdmitted(ticket=ticket, task_id="t0", prompt="p", num_taken=1))
            await log.append(scored_record(ticket.number, scored(0, []), None))
        async with open_log(tmp_path / "journal") as log:
            resume = await recover(log, beginning(stream), PenstockConfig.model_validate({}), stream)
            assert resume.gate.ready == ()
            assert [(one.group.number, one.reason) for one in resume.lost] == [(0, "empty")]

    asyncio.run(scene())


@pytest.mark.parametrize("state", ["lost", "running", "scored", "dropped"])
def test_a_group_that_was_acknowledged_and_is_not_in_the_journal_is_a_violation(
    state: str, tmp_path: Path
) -> None:
    ticket = Ticket(number=0, bound=1, deadline=1)

    async def scene() -> Attempts:
        async with open_log(tmp_path / "journal") as log:
            if state != "lost":
                await log.append(GroupAdmitted(ticket=ticket, task_id="t0", prompt="p", num_taken=1))
            if state in ("scored", "dropped"):
                await log.append(scored_record(ticket.number, scored(0, [0]), None))
            if state == "dropped":
                await log.append(GroupDropped(number=0, reason="stale", returns="t0"))
            return log.attempts

    is_kept = state in ("scored", "dropped")
    message = "group 0 was acknowledged, and the journal does not have it"
    with contextlib.nullcontext() if is_kept else pytest.raises(AssertionError, match=message):
        audit_acknowledged(asyncio.run(scene()), {0})


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_finished_group_comes_back_with_its_blobs_or_is_lost_with_a_reason(
    tmp_path: Path, is_lost: bool
) -> None:
    """Its masks were in the memory of processes that are gone. Without them it can't be trained on."""
    before, after, journal = MemoryBlobs(), MemoryBlobs(), tmp_path / "journal"
    stream = TaskStream([Task(id="t3", prompt="p")], shuffle=False)
    group = msgspec.structs.replace(scored(3, [0, 0]), group=group_with_blob(before))
    ticket = Ticket(number=3, bound=1, deadline=1)

    async def scene() -> None:
        async with open_log(journal, blobs=before) as log:
            log.append(VersionIssued(version=0, step=0))
            await log.append(GroupAdmitted(ticket=ticket, task_id="t3", prompt="p", num_taken=1))
            await log.append(scored_record(ticket.number, group, None))
        if is_lost:
            (journal / "blobs" / "group-3.blobs").write_bytes(b"musk")
        async with open_log(journal, blobs=after) as log:
            resume = await recover(log, beginning(stream), PenstockConfig.model_validate({}), stream)
            assert [one.ticket.number for one in resume.gate.ready] == ([] if is_lost else [3])
            assert after.scopes == ({} if is_lost else {"group-3": {"g3.0.0": b"mask"}})
            assert [one.reason for one in resume.lost] == (["lost_blob"] if is_lost else [])
            told = [(one.group.number, one.group.task.id, one.reason) for one in resume.lost]
            assert told == ([(3, "t3", "lost_blob")] if is_lost else [])
            assert all("group-3" in one.message for one in resume.lost)

    asyncio.run(scene())


def beginning(stream: TaskStream) -> Progress:
    """Of a run that has trained nothing."""
    return Progress(
        step=0,
        max_staleness=1,
        num_admitted=0,
        history=HistoryState(policy="policy", steps=()),
        tasks=stream.state(),
    )
