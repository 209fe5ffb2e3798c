"""Which sequences show what replay is worth, and how far engine and trainer are apart on them."""

import copy

import numpy as np
import pytest
import torch

from penstock.records import (
    BlobRef,
    RoutingRef,
    RoutingShape,
    Score,
    StepPlan,
    TrainSequence,
    metric_values,
)
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.step.routing_sample import SAMPLED_TOKENS, choose_sample
from tests.models.moe import moe_model
from tests.records.builders import make_sample
from tests.trainer.forward.test_row_routing import Recorded, moved_by
from tests.trainer.test_policy_trainer import trainer_for

SHAPE = RoutingShape(family="Moe", num_layers=1, num_experts=4, top_k=1)


def sequence(length: int, *, recorded: bool = True, in_loss: bool = True) -> TrainSequence:
    blob = BlobRef(key="g/a", num_bytes=length - 1, checksum=0)
    ref = RoutingRef(start=0, num_tokens=length - 1, shape=SHAPE, blob=blob)
    sample = make_sample([0] * length, in_loss & (np.arange(length) > 0), routing=(ref,) if recorded else ())
    return TrainSequence(sample=sample, group=0, episode=0)


def plan_of(*batches: tuple[TrainSequence, ...]) -> StepPlan:
    sequences = [each for batch in batches for each in batch]
    return StepPlan(
        step=1,
        ages=({0: 0},),
        fresh=(0,),
        micro_batches=batches,
        num_loss_tokens=sum(int(each.sample.loss_mask.sum()) for each in sequences),
        num_sequences=len(sequences),
        scores=(tuple(Score(value=float(number)) for number in range(4)),),
        num_tokens=((1,) * 4,),
    )


def lengths(*sequences: TrainSequence) -> list[int]:
    return [len(each.sample.token_ids) for each in choose_sample(sequences)]


def test_the_shortest_sequences_are_chosen_until_there_are_enough_tokens() -> None:
    assert SAMPLED_TOKENS == 256
    assert lengths(sequence(900), sequence(101), sequence(181), sequence(151)) == [101, 151, 181]
    assert lengths(sequence(900), sequence(700)) == [700]


def test_only_sequences_with_a_record_and_tokens_in_the_loss_show_something() -> None:
    assert lengths(sequence(20, recorded=False), sequence(30, in_loss=False), sequence(40)) == [40]
    assert lengths(sequence(20, recorded=False)) == []


def test_both_gaps_are_of_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them comes out of the step's rows, in which the sequences lie among others."""
    monkeypatch.setattr("penstock.trainer.step.routing_sample.SAMPLED_TOKENS", 30)
    model = moe_model("qwen3-moe")
    recorded = Recorded(model)
    moved = moved_by(model, 0.3)
    first, second, third, fourth = recorded.sequences  # each shorter than the one before it
    plan = plan_of((first, fourth), (third, second))
    assert choose_sample(recorded.sequences) == [fourth, third]
    policy = PackedModel(copy.deepcopy(moved), chunk_tokens=64)
    recorded.sequences = [fourth, third]
    row = recorded.row(shared=False)
    with torch.no_grad():
        expected = [
            float((policy(row, replays_routing=replays).logprobs - row.behaviour_logprobs).abs().mean())
            for replays in (True, False)
        ]
    trainer = trainer_for(moved, blobs=recorded.blobs, learning_rate=0.0, shared_prompts=False)
    passes = []
    run = PackedModel.__call__
    monkeypatch.setattr(
        PackedModel, "__call__", lambda self, row, **how: passes.append(row) or run(self, row, **how)
    )
    metrics = metric_values(trainer.step(plan).metrics)
    assert [metrics[name] for name in ("routing_gap", "routing_gap_without")] == pytest.approx(
        expected, rel=1e-5
    )
    assert abs(expected[0] - expected[1]) > 0.01
    assert len(passes) == 3  # two rows, and the sample once
