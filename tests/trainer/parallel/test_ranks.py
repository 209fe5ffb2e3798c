"""Ranks gather by rank, and a step does not depend on how many ranks train it."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.algorithms.config import AlgorithmConfig
from penstock.blob_stores import MemoryBlobs
from penstock.errors import BlobLost
from penstock.records import BlobRef, MaskRef, StepPlan, merge_metrics, metric_values
from penstock.records.interfaces import Ranks
from penstock.records.metrics import QUANTILE_ERROR
from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel.rank_layout import RankLayout
from penstock.trainer.parallel.ranks import RankRoles, SingleRank, ThreadRanks
from penstock.trainer.step.packing import plan_step
from tests.trainer.builders import VOCAB, tiny_model
from tests.trainer.test_algorithms import near_policy
from tests.trainer.test_policy_trainer import SGD, trainer_for


def on_each(ranks: list[Any], work: Callable[[Ranks], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))


@pytest.mark.parametrize("ranks", [[SingleRank()], ThreadRanks.of(1), ThreadRanks.of(3)], ids=len)
def test_every_rank_sees_what_each_gave(ranks: list[Any]) -> None:
    """Twice in a row, with lengths that differ."""

    def work(own: Ranks) -> list[Any]:
        first = own.gather(np.arange(own.rank))
        second = own.gather(np.array([[own.rank, own.size]]))
        return [[part.tolist() for part in first], [part.tolist() for part in second]]

    size = len(ranks)
    expected = [[list(range(rank)) for rank in range(size)], [[[rank, size]] for rank in range(size)]]
    assert on_each(ranks, work) == [expected] * size


class Trained:
    """One step of a plan for each rank: gradients, statistics and metrics."""

    def __init__(self, model: Any, plans: tuple[StepPlan, ...], algorithm: AlgorithmConfig) -> None:
        ranks = [SingleRank()] if len(plans) == 1 else ThreadRanks.of(len(plans))
        trainers = []
        for own in ranks:
            torch.manual_seed(0)  # value heads begin alike
            trainers.append(trainer_for(copy.deepcopy(model), algorithm=algorithm, ranks=own))
        self.prepared = on_each(ranks, lambda own: trainers[own.rank]._prepare(plans[own.rank]))
        keepers = [SGD(trainer) for trainer in trainers]
        results = on_each(ranks, lambda own: trainers[own.rank].step(plans[own.rank]))
        self.metrics = metric_values(merge_metrics([result.metrics for result in results]))
        self.gradients = [list(keeper.gradients.values()) for keeper in keepers]
        self.statistics = {row.statistic for rows in self.prepared for row in rows}


ALGORITHMS = [
    {"loss": "m2po", "loss_args": {"budget": 0.01}},
    {"advantage": "gae"},
    {"loss": "gspo"},
    {"advantage": "step_returns", "length_norm": "sequence"},
]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_step_is_the_same_on_any_number_of_ranks(algorithm: dict[str, Any], num_ranks: int) -> None:
    model = tiny_model("llama")
    groups = near_policy(model, 3, shape=(3, 4, 2))
    config = AlgorithmConfig(**algorithm)
    one, several = (
        Trained(model, plan_step(1, groups, ranks=ranks, micro_batch_tokens=30), config)
        for ranks in (1, num_ranks)
    )
    (expected,) = one.gradients
    for gradients in several.gradients:
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert several.metrics.keys() == one.metrics.keys()
    for name in one.metrics.keys() - {"prompt_tokens_shared"}:  # which depends on the rows
        tolerance = 2 * QUANTILE_ERROR if name.startswith("ratio_p") else 1e-4
        assert several.metrics[name] == pytest.approx(one.metrics[name], rel=tolerance, abs=1e-5), name
    (statistic,) = several.statistics
    assert statistic == pytest.approx(*one.statistics, rel=1e-4)
    if algorithm.get("loss") == "m2po":
        assert 0 < statistic < 1
        assert one.metrics["clip_fraction"] > 0


def test_a_rank_without_rows_takes_part() -> None:
    """One sequence for two ranks: the other has nothing to lay out, and still gathers."""
    model = tiny_model("llama")
    groups = near_policy(model, 5, shape=(1,))
    config = AlgorithmConfig(loss="m2po", advantage="gae")
    plans = plan_step(1, groups, ranks=2, micro_batch_tokens=1000)
    assert sorted(sum(len(batch) for batch in plan.micro_batches) for plan in plans) == [0, 1]
    one = Trained(model, plan_step(1, groups, micro_batch_tokens=1000), config)
    two = Trained(model, plans, config)
    for gradients in two.gradients:
        for ours, theirs in zip(gradients, one.gradients[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_blob_lost_on_one_rank_stops_both() -> None:
    model = tiny_model("llama")
    plans = plan_step(1, near_policy(model, 3, shape=(2, 2)), ranks=2, micro_batch_tokens=30)
    blob = BlobRef(key="group-0/a.mask", num_bytes=4, checksum=0)
    first = plans[0].micro_batches[0][0]
    mask = MaskRef(start=1, num_tokens=1, vocab_size=VOCAB, blob=blob)
    sample = msgspec.structs.replace(first.sample, sampling_masks=(mask,))
    batches = ((msgspec.structs.replace(first, sample=sample),), *plans[0].micro_batches[1:])
    plans = (msgspec.structs.replace(plans[0], micro_batches=batches), plans[1])

    def work(own: Ranks) -> str:
        trainer = trainer_for(copy.deepcopy(model), ranks=own, blobs=MemoryBlobs())
        with pytest.raises(BlobLost) as lost:
            trainer.step(plans[own.rank])
        return str(lost.value)

    named, other = on_each(ThreadRanks.of(2), work)
    assert named.startswith("blob group-0/a.mask is not in this process's memory")
    assert other == "a blob that another rank needs is lost"


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_update_on_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama")
    plans = plan_step(1, near_policy(model, 3, shape=(2, 2)), ranks=2, micro_batch_tokens=30)

    def work(own: Ranks) -> tuple[float, bool]:
        trainer = trainer_for(copy.deepcopy(model), ranks=own, learning_rate=0.1)
        if own.rank == 1:
            objective = trainer._objective

            def spoiled(row: Any) -> Any:
                result = objective(row)
                return replace(result, loss=result.loss + float("inf"))

            trainer._objective = spoiled  # type: ignore[assignment]
        before = {name: weight.clone() for name, weight in trainer.weights().items()}
        result = trainer.step(plans[own.rank])
        kept = all(torch.equal(weight, before[name]) for name, weight in trainer.weights().items())
        return result.values()["skipped_updates"], kept

    assert on_each(ThreadRanks.of(2), work) == [(1.0, True), (1.0, True)]


def processes(layout: RankLayout) -> Any:
    names = ("data", "gradients", "world", "checkpoints")
    return SimpleNamespace(layout=layout, **{name: object() for name in names})


def layout_of(**sizes: int) -> RankLayout:
    return RankLayout(parallel=ParallelConfig(**sizes), rank=0)


def test_a_trainer_that_is_alone_hears_itself_in_every_role():
    roles = RankRoles.of(None, None)
    assert [part.tolist() for part in roles.world.gather(np.array([3, 1]))] == [[3, 1]]
    assert roles.data is roles.gradients is roles.world
    assert (roles.layout, roles.checkpoints, roles.is_split) == (None, None, False)
    roles.split("no model", "no config", "cpu")  # type: ignore[arg-type]  # nothing is split


def test_ranks_that_are_given_take_every_role():
    (first, _) = ThreadRanks.of(2)
    roles = RankRoles.of(first, None)
    assert (roles.data, roles.gradients, roles.world) == (first, first, first)


@pytest.mark.parametrize(("sizes", "is_split"), [({"data": 2}, False), ({"shard": 2}, True)])
def test_processes_have_a_group_for_each_role(sizes: dict[str, int], is_split: bool):
    group = processes(layout_of(**sizes))
    roles = RankRoles.of(None, group)
    assert (roles.data, roles.gradients, roles.world) == (group.data, group.gradients, group.world)
    assert (roles.checkpoints, roles.layout, roles.is_split) == (group.checkpoints, group.layout, is_split)
