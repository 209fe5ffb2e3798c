"""Routers that err while they sample: what is recorded is what they chose, and a trainer that replays it agrees."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.learning.arms import Arm, SamplerRouters, Setup
from benchmarks.learning.bed import TestBed
from benchmarks.learning.routed_sampler import NoisyChoices
from penstock.demo.arithmetic import make_tasks
from penstock.models.load import load_model
from penstock.records import TrainSequence
from penstock.records.routing_records import fetch_routes
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow

NOISE = 1.0


def bed_of(setup: Setup, mixture: Path, noise: float, replays: bool) -> TestBed:
    arm = Arm(name="test", routers=SamplerRouters(noise=noise, replays=replays))
    return TestBed(arm, 0, dataclasses.replace(setup, model=str(mixture)), keep=1)


def test_a_trainer_that_replays_computes_what_was_sampled_and_one_that_does_not_differs(
    setup: Setup, mixture: Path
) -> None:
    bed = bed_of(setup, mixture, NOISE, replays=True)
    groups = bed.sampler.sample(list(enumerate(make_tasks("train", size=3, seed=0))), [0] * 5)
    samples = [episode.samples()[0] for group in groups for episode in group.episodes]
    policy = PackedModel(load_model(str(mixture)), chunk_tokens=1024)
    assert policy.routers is not None
    sequences = [TrainSequence(sample=sample, group=0, episode=index) for index, sample in enumerate(samples)]
    row = PackedRow.of(sequences, blobs=bed._blobs, routing=policy.routers.shape)
    assert row is not None
    with torch.no_grad():
        replayed, free = (policy(row, replays_routing=replays) for replays in (True, False))
    recorded = row.behaviour_logprobs
    assert float((replayed.logprobs - recorded).abs().max()) < 1e-5
    assert float((free.logprobs - recorded).abs().max()) > 1e-2
    flipped, num_choices, num_replayed = replayed.routing.tolist()  # type: ignore[union-attr]
    assert num_replayed == num_choices
    assert 0.05 < flipped / num_choices < 0.95


def test_a_record_has_a_row_for_every_token_but_the_last(setup: Setup, mixture: Path) -> None:
    bed = bed_of(setup, mixture, NOISE, replays=True)
    (group,) = bed.sampler.sample([(7, make_tasks("train", size=1, seed=0)[0])], [0] * 5)
    prompts = []
    for index, episode in enumerate(group.episodes):
        (turn,) = episode.turns
        (ref,) = turn.routing
        assert (ref.start, ref.end) == (0, len(turn.token_ids) - 1)
        assert ref.blob.key == f"group-7/{index}.routes"
        prompts.append(fetch_routes(bed._blobs, ref)[: len(turn.prompt_ids)])
    assert all(np.array_equal(prompt, prompts[0]) for prompt in prompts)


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_nothing_is_recorded_where_nothing_is_replayed(setup: Setup, mixture: Path, noise: float) -> None:
    bed = bed_of(setup, mixture, noise, replays=False)
    (group,) = bed.sampler.sample([(7, make_tasks("train", size=1, seed=0)[0])], [0] * 5)
    assert [turn.routing for episode in group.episodes for turn in episode.turns] == [()] * setup.group_size
    assert bed._blobs.scopes == {}


class Gate(nn.Module):
    top_k = 1

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.weight = torch.tensor(logits)[:, None]

    def forward(self, states: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("logits", "noise", "share"),
    [([0.01, 0, 0], 0.5, 0.66), ([4.0, 0, 0], 0.5, 0.0), ([0.01, 0, 0], 0.0, 0.0)],
)
def test_noise_decides_close_scores_and_not_clear_ones(
    logits: list[float], noise: float, share: float
) -> None:
    gate = Gate(logits)
    choices = NoisyChoices([gate], noise=noise, generator=torch.Generator().manual_seed(0))
    gate(torch.ones(1, 500, 1))
    chosen = choices.choose(0, torch.zeros(500, 1, dtype=torch.long))
    assert float((chosen != 0).float().mean()) == pytest.approx(share, abs=0.06)
    assert torch.equal(choices.ids[0], chosen)
