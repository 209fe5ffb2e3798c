import math

import pytest
import torch

from penstock.trainer.step_metrics import StepRecord, effective_sample_size, summarise
from penstock.types import Score, StepPlan


def make_plan(*groups):
    scores = tuple(tuple(Score(value=value) for value in group) for group in groups)
    return StepPlan(step=6, scores=scores, micro_batches=(), num_loss_tokens=4, num_sequences=2)


def test_effective_sample_size_by_hand():
    """Weights 1, 1 → 1; 1, 3 → 16/(2·10) = 0.8; one that outweighs the rest → 1/n."""
    assert effective_sample_size(torch.zeros(2)) == 1.0
    assert effective_sample_size(torch.tensor([0.0, math.log(3)])) == pytest.approx(0.8)
    assert effective_sample_size(torch.tensor([50.0, 0, 0, 0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.zeros(0)) == 1.0


def test_summary_by_hand():
    record = StepRecord()
    columns = {"entropy": [1.0, 3.0], "weight": [1.0, 0.0], "clip_fraction": [0.0, 1.0]}
    gaps = {"gap": [0.0, math.log(3)], "advantage": [2.0, 0.0], "age": [0.0, 2.0]}
    for index in (0, 1):
        part = {name: torch.tensor([values[index]]) for name, values in {**columns, **gaps}.items()}
        record.add(torch.tensor(0.5), part)
    record.fetch()
    metrics = summarise(record, make_plan([1.0, 0.0], [2.0]))
    expected = {
        "loss": 1.0,
        "num_loss_tokens": 2,
        "reward_mean": 1.0,
        "reward_std": math.sqrt(2 / 3),
        "entropy": 2.0,
        "masked_fraction": 0.5,
        "clip_fraction": 0.5,
        "ratio_mean": 2.0,
        "ratio_max": 3.0,
        "ess": 0.8,
        "kl": (2 - math.log(3)) / 2,
        "advantage_mean": 1.0,
        "zero_advantage_fraction": 0.5,
        "staleness_mean": 1.0,
        "staleness_max": 2.0,
        "staleness_positive": 0.0,
        "version_spread": 2.0,
        "logprob_gap_mean": 0.0,
        "clip_fraction_age_2_3": 1.0,
        "kl_age_2_3": 2 - math.log(3),
        "tokens_age_0": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "staleness_negative" not in metrics


def test_a_step_without_loss_tokens_still_reports_rewards():
    assert summarise(StepRecord(), make_plan([1.0, 3.0])) == {
        "loss": 0.0,
        "num_loss_tokens": 0.0,
        "reward_mean": 2.0,
        "reward_std": 1.0,
    }


def test_nothing_is_fetched_from_a_device_before_it_is_asked_for():
    """Fetching waits for the device. What is on `meta` can't be fetched at all."""
    record = StepRecord()
    column = torch.ones(3, device="meta", requires_grad=True)
    record.add(column.sum(), {"gap": column})
    assert not record.columns["gap"][0].requires_grad
    assert not record.losses[0].requires_grad
    with pytest.raises(NotImplementedError):
        record.fetch()
