"""Columns on their way from scores to a loss that reads them."""

import copy

import msgspec
import numpy as np
import pytest
import torch

from penstock.algorithms.config import AlgorithmConfig
from penstock.algorithms.losses import result
from penstock.errors import UserError
from penstock.records import ScoredGroup, TokenColumn
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.step.packing import plan_step
from tests.trainer.builders import make_groups, tiny_model
from tests.trainer.test_policy_trainer import assert_same, gradients_of


def distil(tokens):
    """A loss that pulls the policy to a teacher: log π weighted by log π − log π_teacher."""
    return result(tokens, (tokens.logprobs.detach() - tokens.columns["teacher"]) * tokens.logprobs)


def renames(tokens):
    return result(tokens, -tokens.logprobs * tokens.advantages, weight=tokens.weights)


def taught(groups: list[ScoredGroup], *, skip: int | None = None) -> list[ScoredGroup]:
    """Groups whose scores bring a teacher's logprobs: −(position + 1); episode `skip` of each has none."""

    def score(scored, index):
        length = len(scored.group.episodes[index].turns[0].output_ids)
        values = -np.arange(1, length + 1, dtype=np.float32)
        columns = () if index == skip else (TokenColumn(turn=0, name="teacher", values=values),)
        return msgspec.structs.replace(scored.scores[index], columns=columns)

    return [
        msgspec.structs.replace(one, scores=tuple(score(one, index) for index in range(len(one.scores))))
        for one in groups
    ]


def config() -> AlgorithmConfig:
    return AlgorithmConfig(loss=f"{__name__}:distil", corrections={})


def test_a_loss_reads_the_teachers_logprobs_whatever_the_split():
    model = tiny_model("llama")
    groups = taught(make_groups(3, shape=(3, 4)))
    (whole,) = plan_step(1, groups, micro_batch_tokens=10_000)
    (split,) = plan_step(1, groups, micro_batch_tokens=20)
    assert len(split.micro_batches) > 3
    one, expected = gradients_of(copy.deepcopy(model), whole, algorithm=config())
    _, ours = gradients_of(copy.deepcopy(model), split, algorithm=config())
    assert_same(ours, expected)
    (other,) = plan_step(1, taught(make_groups(3, shape=(3, 4)), skip=1), micro_batch_tokens=10_000)
    two, _ = gradients_of(copy.deepcopy(model), other, algorithm=config())
    assert one["loss"] != pytest.approx(two["loss"])


@pytest.mark.parametrize("shared", [False, True])
def test_a_packed_row_holds_the_values_of_its_loss_tokens(shared: bool):
    groups = taught(make_groups(0, shape=(3,)), skip=1)
    (plan,) = plan_step(1, groups, micro_batch_tokens=10_000, shared_prompts=shared)
    assert plan.columns == ("teacher",)
    (sequences,) = plan.micro_batches
    row = PackedRow.of(sequences, shared_prompts=shared, columns=plan.columns)
    assert row is not None
    expected = [
        np.zeros(count) if sequence.episode == 1 else -np.arange(1, count + 1)
        for sequence, count in zip(row.sequences, row.counts, strict=True)
    ]
    assert row.columns["teacher"].dtype == torch.float32
    assert row.columns["teacher"].tolist() == np.concatenate(expected).tolist()


def test_scores_of_a_plan_leave_their_columns_to_the_samples():
    (plan,) = plan_step(1, taught(make_groups(0, shape=(3,))), micro_batch_tokens=10_000)
    assert [score.columns for score in plan.scores[0]] == [(), (), ()]


def test_a_column_that_nobody_has_is_named():
    (plan,) = plan_step(1, make_groups(0), micro_batch_tokens=10_000)
    with pytest.raises(
        UserError, match=r"reads the token column 'teacher', and no sample .* \(they have: none\)"
    ):
        gradients_of(tiny_model("llama"), plan, algorithm=config())


def test_a_row_without_the_column_has_zeros_when_others_of_the_step_have_it():
    """Whether a loss finds its column must not hang on how sequences were packed."""
    groups = [*taught(make_groups(0, shape=(2,))), *make_groups(1, shape=(2,))]
    (plan,) = plan_step(1, groups, micro_batch_tokens=8)
    metrics, _ = gradients_of(tiny_model("llama"), plan, algorithm=config())
    assert np.isfinite(metrics["loss"])


def test_what_a_loss_reports_can_not_take_the_name_of_what_every_step_reports():
    (plan,) = plan_step(1, make_groups(0), micro_batch_tokens=10_000)
    named = AlgorithmConfig(loss=f"{__name__}:renames", corrections={})
    with pytest.raises(
        UserError, match="renames' reports 'weight', which every step reports itself; give it an"
    ):
        gradients_of(tiny_model("llama"), plan, algorithm=named)
