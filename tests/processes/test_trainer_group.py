"""Ranks answer as one, and when one fails the error that says most is heard."""

import asyncio
from typing import Any

import pytest

from penstock.errors import (
    BlobLost,
    RemoteError,
    SnapshotReplaced,
    StepTooLarge,
    TrainerLost,
    UpdateAbandoned,
    UserError,
)
from penstock.processes import trainer_group
from penstock.processes.trainer_group import TrainerGroup, group_of
from penstock.records import CheckpointWritten, StepPlan, StepResult, TensorSpec, WeightUpdate


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, scores=(), micro_batches=(), num_loss_tokens=1, num_sequences=1)


class Rank:
    """Answers with its number; what it is told to raise, it raises; None waits for ever."""

    def __init__(self, number: int, fault: "Exception | str" = "") -> None:
        self.number, self.fault = number, fault
        self.asked: list[Any] = []

    async def _act(self, what: Any) -> None:
        self.asked.append(what)
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault == "waits":
            await asyncio.Event().wait()

    async def step(self, plan: StepPlan) -> StepResult:
        await self._act(plan.step)
        return StepResult(step=plan.step, metrics={}, seconds={"rank": float(self.number)})

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        await self._act((version, full))
        spec = TensorSpec(
            name="w",
            shape=(4,),
            dtype="float32",
            bucket=0,
            offset=0,
            num_bytes=8,
            start=(2 * self.number,),
            sizes=(2,),
        )
        return WeightUpdate(
            policy="policy",
            version=version,
            transport="in_process",
            tensors=(spec,),
            buckets=(f"of {self.number}",),
            fingerprint={"w": 2**63 + self.number},
        )

    async def send(self, version: int) -> None:
        try:
            await self._act(version)
        except asyncio.CancelledError:
            self.asked.append("cancelled")
            raise

    async def release(self, version: int, *, delivered: bool = True) -> None:
        await self._act((version, delivered))

    async def checkpoint_written(self) -> CheckpointWritten:
        await self._act("written")
        return CheckpointWritten(seconds=1.0 + self.number, num_bytes=10)


def group(*faults: "Exception | str", share_plans: int = 1) -> tuple[TrainerGroup, list[Rank]]:
    ranks = [Rank(number, fault) for number, fault in enumerate(faults)]
    return TrainerGroup(ranks, share_plans=share_plans), ranks  # type: ignore[arg-type]


def test_ranks_that_share_a_plan_get_it_and_the_first_reports() -> None:
    whole, ranks = group("", "", "", "", share_plans=2)
    assert whole.num_plans == 2
    results = asyncio.run(whole.run([plan(1), plan(2)]))
    assert [rank.asked for rank in ranks] == [[1], [1], [2], [2]]
    assert [result.seconds["rank"] for result in results] == [0.0, 2.0]
    with pytest.raises(ValueError, match="2 plans are needed, got 1"):
        asyncio.run(whole.run([plan(1)]))


def test_slices_of_all_ranks_are_one_update() -> None:
    whole, _ = group("", "")
    update = asyncio.run(whole.as_one.publish(3, full=True))
    assert [(spec.start, spec.bucket) for spec in update.tensors] == [((0,), 0), ((2,), 1)]
    assert (update.buckets, update.fingerprint) == (("of 0", "of 1"), {"w": 1})
    written = asyncio.run(whole.as_one.checkpoint_written())
    assert (written.seconds, written.num_bytes) == (2.0, 10)


@pytest.mark.parametrize(
    ("faults", "heard"),
    [
        ((RemoteError("connection closed by peer"), TrainerLost("gone")), "gone"),
        ((BlobLost("a blob that another rank needs is lost"), BlobLost("blob a is cut")), "blob a is cut"),
        ((RemoteError("connection closed by peer"), UserError("out of memory")), "out of memory"),
        (("", SnapshotReplaced("version 1 was replaced")), "version 1 was replaced"),
    ],
    ids=str,
)
def test_of_several_errors_the_one_that_says_most_is_raised(faults: Any, heard: str) -> None:
    whole, _ = group(*faults)
    with pytest.raises((RemoteError, TrainerLost, BlobLost, UserError, SnapshotReplaced), match=heard):
        asyncio.run(whole.as_one.release(1))


@pytest.mark.parametrize(
    ("fault", "raised", "sentence"),
    [
        (UserError("no such expert"), UserError, "no such expert"),
        (RemoteError("bad"), TrainerLost, "the trainer's ranks can't continue without one that failed: bad"),
    ],
    ids=str,
)
def test_ranks_that_wait_for_one_that_failed_are_ended(
    fault: Exception, raised: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_group, "ANSWER_GRACE_S", 0.01)
    ended = []

    async def give_up(why: str) -> None:
        ended.append(why)

    ranks = [Rank(0, "waits"), Rank(1, fault)]
    whole = TrainerGroup(ranks, give_up=give_up)  # type: ignore[arg-type]
    with pytest.raises(raised, match=sentence):
        asyncio.run(whole.run([plan(1), plan(1)]))
    assert ended == [f"the trainer's ranks can't continue without one that failed: {fault}"]


@pytest.mark.parametrize(
    "other", ["waits", StepTooLarge("no room either"), RemoteError("closed by peer")], ids=str
)
def test_when_one_has_no_room_for_a_step_all_ranks_begin_again(
    other: "Exception | str", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nobody waits: where each of them stopped is not known."""
    monkeypatch.setattr(trainer_group, "ANSWER_GRACE_S", 0.01)
    ended = []

    async def give_up(why: str) -> None:
        ended.append(why)

    whole = TrainerGroup([Rank(0, StepTooLarge("no room")), Rank(1, other)], give_up=give_up)  # type: ignore[list-item]
    with pytest.raises(TrainerLost) as lost:
        asyncio.run(whole.run([plan(1), plan(1)]))
    assert isinstance(lost.value.__cause__, StepTooLarge)
    assert ended == ["the trainer's ranks can't continue without one that failed: no room"]


def test_a_group_stays_what_it_is() -> None:
    whole, ranks = group("", "", share_plans=2)
    assert group_of(whole) is whole
    assert group_of(ranks).num_plans == 2  # type: ignore[arg-type]


def test_a_send_that_fails_cancels_the_others_and_ends_no_rank() -> None:
    """An engine failed, not a rank. What failed says more than who was told."""
    ended: list[str] = []

    async def give_up(why: str) -> None:
        ended.append(why)

    waits = Rank(0, "waits")
    told, failed = (
        Rank(1, UpdateAbandoned("the update was abandoned")),
        Rank(2, UserError("an engine is gone")),
    )
    with pytest.raises(UserError, match="an engine is gone"):
        asyncio.run(TrainerGroup([waits, told, failed], give_up=give_up).as_one.send(3))  # type: ignore[list-item]
    assert waits.asked == [3, "cancelled"]
    assert ended == []
