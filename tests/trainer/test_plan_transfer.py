"""A plan goes out in bounded pieces and comes together as it was."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.channel import implement, remote, serve
from penstock.channel.connection import MAX_FRAME_BYTES
from penstock.records import (
    NOT_SAMPLED,
    BlobRef,
    MaskRef,
    Sample,
    StepPlan,
    StepResult,
    TrainSequence,
    codec,
)
from penstock.records.interfaces import Trainer
from penstock.trainer.plan_transfer import (
    PIECE_BYTES,
    ArrivingPlans,
    PlanAssembly,
    PlanHeader,
    PlanPiece,
    PlanTaker,
    header_of,
    messages_of,
    pieces_of,
    remote_trainer,
    serve_trainer,
)
from penstock.trainer.step.packing import plan_step
from tests.channel.test_connection import pair
from tests.records.builders import make_sample
from tests.trainer.builders import make_groups


def stepping(step: Any) -> Trainer:
    """A trainer that makes steps."""
    return implement(Trainer, lambda name: step)


def plain(plan: StepPlan) -> bytes:
    """Equal for plans that hold the same."""
    return codec.encode(plan)


@settings(max_examples=50)
@given(st.integers(0, 100), st.integers(1, 4), st.integers(1, 8000), st.integers(5, 60))
def test_any_cut_comes_together(seed: int, ranks: int, max_bytes: int, budget: int) -> None:
    for plan in plan_step(4, make_groups(seed, shape=(3, 2, 4)), ranks=ranks, micro_batch_tokens=budget):
        arriving = PlanAssembly(codec.decode(codec.encode(header_of(plan)), PlanHeader))
        for piece in pieces_of(plan, max_bytes):
            data = codec.encode(piece)
            assert len(data) <= max_bytes or len(piece.sequences) + len(piece.scores) == 1
            arriving.add(codec.decode(data, PlanPiece))
        assert plain(arriving.plan()) == plain(plan)


def test_a_plan_with_a_piece_missing_is_refused() -> None:
    (plan,) = plan_step(4, make_groups(0, shape=(3, 2)), micro_batch_tokens=60)
    arriving = PlanAssembly(header_of(plan))
    *pieces, _ = pieces_of(plan, 1)
    for piece in pieces:
        arriving.add(piece)
    with pytest.raises(ValueError, match="step 4 must have 2 groups and 5 sequences, got 2 and 4"):
        arriving.plan()


def long_sample(num_tokens: int, seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    versions = np.full(num_tokens, 3, dtype=np.int32)
    versions[:9] = NOT_SAMPLED
    blob = BlobRef(key=f"group-{seed}/a.mask", num_bytes=4, checksum=1)
    return make_sample(
        rng.integers(0, 50_000, num_tokens),
        versions >= 0,
        logprobs=rng.normal(size=num_tokens),
        versions=versions,
        sampling_masks=(MaskRef(start=9, num_tokens=7, vocab_size=9, blob=blob),),
        columns={"teacher": rng.normal(size=num_tokens).astype(np.float32)},
    )


def test_a_plan_larger_than_any_message_reaches_its_trainer() -> None:
    samples = [long_sample(500_000, seed) for seed in range(9)]
    batches = tuple((TrainSequence(sample=sample, group=0, episode=0),) for sample in samples)
    plan = StepPlan(step=7, scores=(), micro_batches=batches, num_loss_tokens=1, num_sequences=9)
    assert sum(sample.token_ids.nbytes * 17 // 4 for sample in samples) > MAX_FRAME_BYTES
    arrived: list[StepPlan] = []

    async def step(plan: StepPlan) -> StepResult:
        arrived.append(plan)
        return StepResult(step=plan.step, metrics={}, seconds={"forward": 1.0})

    async def main() -> StepResult:
        async with pair() as (left, right):
            serve_trainer(stepping(step), right)
            return await remote_trainer(left).step(plan)

    assert asyncio.run(main()).step == 7
    assert len(list(pieces_of(plan))) == 9  # a sequence is more than half a piece, and is not cut
    assert PIECE_BYTES < 17 * 500_000
    for sample, batch in zip(samples, arrived[0].micro_batches, strict=True):
        got = batch[0].sample
        assert got.sampling_masks == sample.sampling_masks
        for name in ("token_ids", "loss_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sample, name))
        np.testing.assert_array_equal(got.columns["teacher"], sample.columns["teacher"])


def test_what_a_cancelled_sender_left_is_forgotten() -> None:
    (old,) = plan_step(4, make_groups(0, shape=(3, 2)), micro_batch_tokens=60)
    (new,) = plan_step(4, make_groups(1, shape=(2,)), micro_batch_tokens=60)
    arrived: list[StepPlan] = []

    async def step(plan: StepPlan) -> StepResult:
        arrived.append(plan)
        return StepResult(step=plan.step, metrics={}, seconds={})

    async def main() -> None:
        async with pair() as (left, right):
            serve(PlanTaker, ArrivingPlans(stepping(step)), right)
            first, *_ = messages_of(old, 1)
            assert await remote(PlanTaker, left).take(first) is None
            await remote_trainer(left).step(new)

    asyncio.run(main())
    assert [plain(plan) for plan in arrived] == [plain(new)]
    assert msgspec.structs.astuple(header_of(new))[1:] == (1, len(new.micro_batches), 2)


def test_a_small_plan_is_one_message() -> None:
    (plan,) = plan_step(4, make_groups(0, shape=(3, 2)), micro_batch_tokens=60)
    (message,) = messages_of(plan)
    assert message.is_last
    assert message.header is not None and message.header.plan.step == 4
    assert (len(message.piece.scores), len(message.piece.sequences)) == (2, 5)
