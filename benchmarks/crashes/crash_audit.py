"""Whether a run that crashed has kept the promise: every attempt ended once, no task was skipped or repeated."""

import contextlib
from collections.abc import Iterator, Sequence

from benchmarks.crashes.crash_world import TASKS, CrashWorld
from penstock.durability.checkpoints import read_progress
from penstock.durability.durable_log import read_attempts
from penstock.durability.kept_checkpoints import checkpoints_of
from penstock.loop.attempt_records import AttemptRecord, GroupAdmitted, GroupDropped, GroupScored
from penstock.loop.attempts import UNDER_WAY, AttemptState
from penstock.loop.spans import numbers_of
from penstock.tasks.stream import TaskStream


def audit(world: CrashWorld) -> None:
    """The promise, checked against what the trainer's weights are made of."""
    weights = world.trainer.weights
    assert world.truth.calls_again == []
    assert len(weights) == world.steps
    assert all(len(groups) == world.groups_per_step for groups in weights)
    trained = [number for groups in weights for number in groups]
    assert len(trained) == len(set(trained)), f"trained twice: {sorted(trained)}"
    last = list(checkpoints_of(world.folder).values())[-1]
    progress = read_progress(last)
    assert numbers_of(progress.consumed) == {one for groups in weights[: progress.step] for one in groups}
    records = world.records()
    scored = [record.number for record in records if isinstance(record, GroupScored)]
    assert len(scored) == len(set(scored))
    _audit_tasks([record for record in records if isinstance(record, GroupAdmitted)])
    audit_returned(records)
    _audit_fold(world)


def _audit_tasks(admitted: list[GroupAdmitted]) -> None:
    """New tasks come in the order of the stream, none skipped and none twice."""
    stream = TaskStream(TASKS, seed=1)
    order = [stream.next().id for _ in range(max((one.num_taken for one in admitted), default=0))]
    last: int | None = None
    for record in admitted:
        if last is not None and record.num_taken != last:
            assert record.num_taken == last + 1, f"{record.num_taken} new tasks after {last}"
            assert record.task_id == order[record.num_taken - 1]
        last = record.num_taken


def audit_returned(records: Sequence[AttemptRecord]) -> None:
    """Tasks that a drop put back come again, each once, before any new one and in that order."""
    waiting: list[str] = []
    last: int | None = None
    for record in records:
        if isinstance(record, GroupDropped) and record.returns is not None:
            waiting.append(record.returns)
        if not isinstance(record, GroupAdmitted):
            continue
        if waiting and last is not None:
            assert record.num_taken == last, f"task {waiting[0]!r} was put back and passed over"
            assert record.task_id == waiting[0], f"{record.task_id!r} came before {waiting[0]!r}"
        if waiting and record.task_id == waiting[0]:
            waiting.pop(0)
        last = record.num_taken


def _audit_fold(world: CrashWorld) -> None:
    attempts = read_attempts(world.files, keeps_content=False)
    assert attempts.counts()["trained"] == sum(map(len, world.trainer.weights))
    waiting = (*UNDER_WAY, AttemptState.SCORED)
    outstanding = {number for number, one in attempts.by_number.items() if one.state in waiting}
    assert outstanding <= world.outstanding, "groups are lost"
    for number, one in attempts.by_number.items():
        if one.step is not None:
            assert number in world.trainer.weights[one.step - 1]


@contextlib.contextmanager
def naming(seed: int) -> Iterator[None]:
    """A schedule that fails says how to replay it."""
    with _noting(
        f"replay it: pytest tests/durability/test_recovery.py -k any_crash --first-seed {seed} --seeds 1"
    ):
        yield


@contextlib.contextmanager
def naming_await(seed: int, crash_at: int) -> Iterator[None]:
    """So does a crash at one await."""
    with _noting(f"replay it: CrashWorld({seed}, folder, steps=2, small=True, crash_at={crash_at}).play()"):
        yield


@contextlib.contextmanager
def _noting(how: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(how)
        raise
