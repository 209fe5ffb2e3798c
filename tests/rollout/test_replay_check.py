from typing import Any, cast

import pytest

from penstock.errors import UserError
from penstock.rollout.episode_spec import EVALUATION, TRAINING
from penstock.rollout.group_runner import RolloutRunner
from penstock.rollout.replay_check import check_replayed
from penstock.types import SamplingParams

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
