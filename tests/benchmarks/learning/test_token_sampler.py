from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learning.arms import Arm, Setup
from benchmarks.learning.bed import TestBed
from benchmarks.learning.token_sampler import Answers, Snapshots, draw
from penstock.demo.arithmetic import make_tasks
from penstock.models.load import load_model
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import TrainSequence
from penstock.scoring.builtin_rewards import exact_match
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow


@pytest.fixture
def bed(setup: Setup) -> TestBed:
    return TestBed(Arm(name="test"), 0, setup, keep=3)


def trainer_logprobs(model: PackedModel, episodes: list) -> np.ndarray:
    sequences = [TrainSequence(sample=one.samples()[0], group=0, episode=0) for one in episodes]
    row = PackedRow.of(sequences)
    assert row is not None
    with torch.no_grad():
        return model(row).logprobs.numpy()


def other_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() * 1.1 for name, tensor in model.named_parameters()}


def test_recorded_logprobs_are_those_of_the_weights_that_sampled(bed: TestBed, adder: Path) -> None:
    model = load_model(str(adder))
    bed._snapshots.add(1, other_weights(model))
    tasks = list(enumerate(make_tasks("train", size=3, seed=0)))
    old, new = (bed.sampler.sample(tasks, [version] * 5) for version in (0, 1))
    packed = PackedModel(model, chunk_tokens=1024)
    for groups, agree in ((old, True), (new, False)):
        episodes = [episode for group in groups for episode in group.episodes]
        recorded = np.concatenate([episode.turns[0].logprobs for episode in episodes])
        gap = np.abs(trainer_logprobs(packed, episodes) - recorded).max()
        assert (gap < 1e-4) == agree
    assert {int(v) for group in new for one in group.episodes for v in one.turns[0].versions} == {1}


def test_weights_change_between_two_tokens(bed: TestBed, adder: Path) -> None:
    bed._snapshots.add(1, other_weights(load_model(str(adder))))
    tasks = [(7, make_tasks("train", size=1, seed=0)[0])]
    old, mixed = (bed.sampler.sample(tasks, versions)[0] for versions in ([0] * 5, [0, 0, 1, 1, 1]))
    for before, after in zip(old.episodes, mixed.episodes, strict=True):
        first, second = before.turns[0], after.turns[0]
        assert first.output_ids[:2].tolist() == second.output_ids[:2].tolist()
        assert np.array_equal(first.logprobs[:2], second.logprobs[:2])
        assert first.logprobs[2] != second.logprobs[2]
        assert second.versions.tolist() == [0, 0, 1, 1, 1][: len(second.versions)]


def test_a_groups_noise_depends_on_its_number_alone(bed: TestBed) -> None:
    tasks = list(enumerate(make_tasks("train", size=3, seed=0)))
    together = bed.sampler.sample(tasks, [0] * 5)
    alone = bed.sampler.sample(tasks[1:2], [0] * 5)[0]
    assert [one.text for one in alone.episodes] == [one.text for one in together[1].episodes]


def test_the_exact_reward_is_the_mean_of_sampled_ones(bed: TestBed, adder: Path) -> None:
    tasks = make_tasks("heldout", size=8, seed=0)
    exact = bed.sampler.exact_reward(Answers.of(tasks, ChatTokenizer(str(adder))), 0)
    numbered = [(number, tasks[number % 8]) for number in range(1600)]
    values = [
        exact_match(group.task, one.text)
        for group in bed.sampler.sample(numbered, [0] * 5)
        for one in group.episodes
    ]
    error = np.std(values) / np.sqrt(len(values))
    assert 0 < exact < 1
    assert np.mean(values) == pytest.approx(exact, abs=4 * error)


def test_draw_inverts_the_cumulative_distribution() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.25]]).log().repeat(5, 1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 1.0], dtype=torch.float64)
    assert draw(logprobs, uniform).tolist() == [0, 0, 1, 1, 2]


def test_snapshots_keep_the_last_versions_as_they_were() -> None:
    snapshots, weight = Snapshots(keep=2), torch.zeros(2)
    for version in range(3):
        snapshots.add(version, {"w": weight})
        weight += 1
    assert snapshots[1]["w"].tolist() == [1, 1]
    with pytest.raises(KeyError):
        snapshots[0]
