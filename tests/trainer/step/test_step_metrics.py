import logging
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.config import AlgorithmConfig
from penstock.records import Metric, Score, StepPlan, StepResult, codec, merge_metrics, metric_values
from penstock.records.interfaces import Ranks
from penstock.records.metrics import Max, Mean
from penstock.trainer.config import TrainerConfig
from penstock.trainer.parallel.ranks import SingleRank, ThreadRanks
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.step import step_metrics
from penstock.trainer.step.packing import plan_step
from penstock.trainer.step.step_metrics import GapWatch, StepRecord, of_pass, summarise
from tests.trainer.builders import make_groups, tiny_model


def make_plan(*groups):
    scores = tuple(tuple(Score(value=value) for value in group) for group in groups)
    return StepPlan(step=6, scores=scores, micro_batches=(), num_loss_tokens=4, num_sequences=2)


def all_of(record, plan):
    return summarise(record, plan) | of_pass(record)


def test_summary_by_hand():
    record = StepRecord()
    columns = {"entropy": [1.0, 3.0], "weight": [1.0, 0.0], "clip_fraction": [0.0, 1.0]}
    gaps = {"gap": [0.0, math.log(3)], "advantage": [2.0, 0.0], "age": [0.0, 2.0], "fresh": [1.0, 0.0]}
    for index in (0, 1):
        part = {name: torch.tensor([values[index]]) for name, values in {**columns, **gaps}.items()}
        record.add(torch.tensor(0.5), part)
    record.fetch()
    metrics = metric_values(all_of(record, make_plan([1.0, 0.0], [2.0])))
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


AGES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 9.0, 40.0])
TOKENS = st.lists(
    st.tuples(
        st.floats(-25, 25, width=32), st.floats(-3, 3, width=32), AGES, st.sampled_from([0.0, 0.5, 1.0, 2.0])
    ),
    min_size=1,
    max_size=40,
)


def record_of(rows: list[tuple[float, ...]]) -> StepRecord:
    record = StepRecord()
    gap, advantage, age, weight = torch.tensor(rows, dtype=torch.float32).reshape(-1, 4).T
    columns = {"gap": gap.clamp(-20, 20), "advantage": advantage, "age": age, "weight": weight}
    columns |= {"fresh": age == 0, "nonfinite": age < 0, "left_out": age < 0}
    columns |= {"entropy": gap.abs(), "clip_fraction": (gap > 1).float(), "value_loss": gap**2}
    record.add(gap.sum() / 100, columns)
    record.fetch()
    return record


@given(TOKENS, st.integers(0, 99))
def test_a_step_split_over_ranks_has_the_metrics_of_one_rank(rows, seed):
    """Whoever computes which tokens, some ranks none: the same names, the same numbers."""
    plan = make_plan([1.0, 0.0], [2.0])
    whole = metric_values(all_of(record_of(rows), plan))
    for ranks in (2, 4):
        owner = np.random.default_rng(seed).integers(0, ranks, len(rows))
        parts = [[row for row, one in zip(rows, owner, strict=True) if one == rank] for rank in range(ranks)]
        merged = merge_metrics([decode_again(all_of(record_of(part), plan)) for part in parts])
        assert metric_values(merged) == pytest.approx(whole, rel=1e-6, abs=1e-6)
        assert merged.keys() >= whole.keys()


def decode_again(metrics):
    """As they arrive from another process."""
    result = StepResult(step=1, metrics=metrics, seconds={})
    return codec.decode(codec.encode(result), StepResult).metrics


def test_a_step_without_loss_tokens_still_reports_rewards():
    assert metric_values(all_of(StepRecord(), make_plan([1.0, 3.0]))) == {
        "loss": 0.0,
        "num_loss_tokens": 0.0,
        "nonfinite_logprobs": 0.0,
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


def test_tokens_without_a_finite_logprob_are_counted_and_in_no_mean():
    record = StepRecord()
    columns = {
        "gap": [0.0, 1.0, 0.0],
        "advantage": [1.0, 1.0, 1.0],
        "age": [0.0, 0.0, 0.0],
        "entropy": [1.0, 1.0, float("nan")],
        "weight": [1.0, 1.0, 0.0],
        "fresh": [1.0, 1.0, 1.0],
        "nonfinite": [0.0, 0.0, 1.0],
        "left_out": [0.0, 0.0, 1.0],
    }
    record.add(torch.tensor(0.0), {name: torch.tensor(column) for name, column in columns.items()})
    metrics = metric_values(all_of(record, make_plan([1.0])))
    assert metrics["nonfinite_logprobs"] == 1
    assert metrics["num_loss_tokens"] == 2
    assert metrics["entropy"] == 1
    assert metrics["ratio_mean"] == pytest.approx((1 + np.e) / 2)
    assert metrics["masked_fraction"] == 0


def gap(total: float, weight: float, largest: float) -> dict[str, Metric]:
    return {"logprob_gap_mean": Mean(total=total, weight=weight), "logprob_gap_max": Max(value=largest)}


def test_the_first_and_every_hundredth_gap_is_told(caplog: pytest.LogCaptureFixture) -> None:
    watch = GapWatch(0.05)
    with caplog.at_level(logging.WARNING):
        watch.see({}, 1, SingleRank())
        watch.see(gap(0.5, 10.0, 0.2), 2, SingleRank())
        assert (watch.num_warnings, caplog.records) == (0, [])
        for step in range(3, 104):
            watch.see(gap(1.0, 10.0, 0.2), step, SingleRank())
    assert watch.num_warnings == 101
    assert [record.args for record in caplog.records] == [(3, 0.1, 0.2, 0.05), (103, 0.1, 0.2, 0.05)]


def test_ranks_judge_the_gap_of_the_whole_step(caplog: pytest.LogCaptureFixture) -> None:
    """Far above the limit on one rank, below it on both together; then above it, where one rank has no tokens."""
    watches = [GapWatch(0.05), GapWatch(0.05)]

    def see(watch: GapWatch, ranks: Ranks, steps: list[dict[str, Metric]]) -> None:
        for step, metrics in enumerate(steps, start=1):
            watch.see(metrics, step, ranks)

    plans = [[gap(2.0, 10.0, 0.9), gap(6.0, 60.0, 0.4)], [gap(1.0, 90.0, 0.1), {}]]
    threads = [
        threading.Thread(target=see, args=each)
        for each in zip(watches, ThreadRanks.of(2), plans, strict=True)
    ]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [watch.num_warnings for watch in watches] == [1, 1]
    assert [record.args for record in caplog.records] == [(2, 0.1, 0.4, 0.05)]


GROUPS = make_groups(0, shape=(3, 2))


def traces(asked, **config):
    trainer = PolicyTrainer(
        tiny_model("llama"),
        config=TrainerConfig(**config),
        algorithm=AlgorithmConfig(loss="clip"),
        total_steps=5,
    )
    (plan,) = plan_step(1, GROUPS, micro_batch_tokens=40, shared_prompts=True, traced=asked)
    return trainer.step(plan).traces


def trainers_logprobs(group: int, episode: int) -> np.ndarray:
    """Of the sampled tokens, by a plain forward pass."""
    (sample,) = GROUPS[group].samples(episode)
    with torch.no_grad():
        logits = tiny_model("llama")(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
    logprobs = torch.log_softmax(logits[:-1].float(), dim=-1)
    chosen = logprobs.gather(1, torch.from_numpy(sample.token_ids[1:].astype(np.int64))[:, None])[:, 0]
    return chosen.numpy()[sample.loss_mask[1:]]


def test_the_answers_that_are_asked_for_come_with_the_trainers_logprobs() -> None:
    found = {(trace.group, trace.episode): trace for trace in traces(((0, 1), (1, 0)))}
    assert {(0, 1), (1, 0)} <= set(found)
    for (group, episode), trace in found.items():
        (sample,) = GROUPS[group].samples(episode)
        engine = sample.logprobs[sample.loss_mask]
        np.testing.assert_allclose(engine + trace.gaps, trainers_logprobs(group, episode), atol=1e-4)
        assert len(set(trace.advantages.tolist())) == 1
        assert trace.weights.shape == trace.gaps.shape
        assert trace.clipped is not None and set(trace.clipped.tolist()) <= {0.0, 1.0}


def test_the_widest_gap_comes_too() -> None:
    gaps = {
        (group, episode): np.abs(trainers_logprobs(group, episode) - sample.logprobs[sample.loss_mask]).max()
        for group, scored in enumerate(GROUPS)
        for episode in range(len(scored.scores))
        for sample in scored.samples(episode)
    }
    widest = max(gaps, key=lambda place: gaps[place])
    other = min(gaps, key=lambda place: gaps[place])
    assert {(trace.group, trace.episode) for trace in traces((other,))} == {widest, other}
    assert [(trace.group, trace.episode) for trace in traces((widest,))] == [widest]


def test_nothing_is_handed_back_unasked() -> None:
    assert traces(()) == ()


def test_what_is_handed_back_is_bounded(monkeypatch) -> None:
    every = tuple((group, episode) for group in (0, 1) for episode in range((3, 2)[group]))
    assert len(traces(every)) == 5
    monkeypatch.setattr(step_metrics, "MAX_TOKENS", 1)
    assert len(traces(every)) == 1
