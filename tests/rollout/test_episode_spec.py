from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.records import SamplingParams
from penstock.records.codec import decode, encode
from penstock.rollout.episode_spec import EVALUATION, TRAINING, EpisodeSpec, check_replayed
from penstock.rollout.group_runner import RolloutRunner
from tests.rollout.contract import spec_of

places = st.tuples(st.sampled_from("ge"), st.integers(-3, 3), st.integers(0, 2), st.integers(0, 2))


@given(st.lists(places, unique=True, max_size=20), st.integers(0, 2**31))
def test_every_turn_of_a_run_has_its_own_id_and_seed(
    where: list[tuple[str, int, int, int]], seed: int
) -> None:
    base = spec_of()
    sampling = msgspec.structs.replace(base.sampling, seed=seed)
    ids, seeds = set(), set()
    for label, group, index, turn in where:
        spec = msgspec.structs.replace(base, label=label, group=group, index=index, sampling=sampling)
        ids.add(spec.turn_id(turn))
        seeds.add(spec.turn_sampling(turn).seed)
    assert len(ids) == len(where)
    assert len(seeds) == len(where)


def test_without_a_seed_turns_have_none() -> None:
    spec = msgspec.structs.replace(spec_of(), sampling=msgspec.structs.replace(spec_of().sampling, seed=None))
    assert spec.turn_sampling(4) == spec.sampling


def test_it_travels() -> None:
    there = decode(encode(spec_of("twice", answer="4")), EpisodeSpec)
    assert (there.name, there.task.columns, there.task.workflow) == (
        "g12.0",
        {"answer": "4"},
        "tests.rollout.workflows:twice",
    )


NOT_REPLAYED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"logit_bias": {3: 1.0}},
    {"min_tokens": 2, "stop_token_ids": (1,)},
]


def runner(sampling: SamplingParams, label: str) -> RolloutRunner:
    return RolloutRunner(cast(Any, None), sampling=sampling, group_size=2, label=label)


@pytest.mark.parametrize("options", NOT_REPLAYED, ids=str)
def test_rollouts_that_are_trained_on_refuse_what_cant_be_replayed(options: dict[str, Any]) -> None:
    sampling = SamplingParams(**options)
    with pytest.raises(
        UserError, match=f"can't be sampled with {next(iter(options))}: the trainer can't replay"
    ):
        runner(sampling, TRAINING)
    runner(sampling, EVALUATION)


def test_what_is_replayed_passes() -> None:
    check_replayed(SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, min_tokens=3))
