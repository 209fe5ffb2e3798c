import math

import pytest
from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.preflight import warn_of_idle_penalty


def config(**sections):
    return PenstockConfig.model_validate(sections)


def test_reinforce_pp_needs_two_episodes_a_step():
    one = {"group_size": 1, "groups_per_step": 1}
    with pytest.raises(ValidationError, match="a step must have at least 2 episodes .*, got 1"):
        config(algorithm={"advantage": "reinforce_pp"}, rollout=one)
    config(algorithm={"advantage": "reinforce_pp"}, rollout={"group_size": 1, "groups_per_step": 2})


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("rollout", "temperature"),
        ("engine", "memory_share"),
        ("eval", "temperature"),
        ("staleness", "ess_floor"),
        ("trainer", "learning_rate"),
        ("reward", "timeout_s"),
        ("observe", "watchdog_s"),
    ],
)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_no_section_takes_an_infinity_or_nan(section, field, value):
    given = {"embedded": {field: value}} if section == "engine" else {field: value}
    with pytest.raises(ValidationError):
        config(**{section: given})


def test_an_overlong_penalty_that_never_acts_is_said():
    said = []
    warn_of_idle_penalty(config(algorithm={"selection": {"overlong_penalty": {}}}), said.append)
    assert said == [
        "algorithm.selection.overlong_penalty begins at 16384 tokens (max_length - margin), and answers have at "
        "most rollout.max_new_tokens=256: it never acts; lower max_length"
    ]
    near = {"overlong_penalty": {"max_length": 256, "margin": 64}}
    warn_of_idle_penalty(config(algorithm={"selection": near}), said.append)
    warn_of_idle_penalty(config(), said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("sent", "held", "is_good"),
    [
        ("engine", "bfloat16", True),
        ("bfloat16", "float32", True),
        ("bfloat16", "bfloat16", True),
        ("float32", "auto", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
    ],
)
def test_engines_must_hold_what_is_sent(sent: str, held: str, is_good: bool) -> None:
    overrides = {"sync": {"dtype": sent}, "engine": {"dtype": held}}
    if is_good:
        PenstockConfig.model_validate(overrides)
    else:
        with pytest.raises(ConfigError, match=rf"what engines of {held} hold without loss, got {sent}"):
            PenstockConfig.model_validate(overrides)


def test_weights_are_published_often_enough_for_the_bound():
    assert config(sync={"every": 5}).sync.every == 5
    with pytest.raises(ValidationError, match="sync.every must be at most 5, got 6: engines would sample"):
        config(sync={"every": 6})
    with pytest.raises(ValidationError, match="sync.every must be at most 2, got 3"):
        config(sync={"every": 3}, staleness={"adaptive": True})
