import pytest
from pydantic import ValidationError

from penstock.algorithms.config import AlgorithmConfig
from penstock.errors import ConfigError


def test_defaults_and_needs():
    config = AlgorithmConfig()
    assert (config.advantage, config.loss, config.proximal, config.length_norm) == (
        "grpo",
        "topr",
        "behaviour",
        "token",
    )
    assert config.corrections == {"negative_sequence_mask": {}}
    assert not config.needs_reference
    assert AlgorithmConfig(kl_coef=0.1).needs_reference
    assert AlgorithmConfig(advantage="gae").needs_values
    assert AlgorithmConfig(loss="decoupled").effective_proximal == "start"


@pytest.mark.parametrize(
    ("advantage", "needs"),
    [("grpo", True), ("rloo", True), ("pass_at_k", True), ("reinforce_pp", False), ("gae", False)],
)
def test_which_advantages_compare_within_a_group(advantage, needs):
    assert AlgorithmConfig(advantage=advantage).needs_group is needs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "clipp"}, "unknown loss 'clipp'; did you mean 'clip'?"),
        (
            {"loss": "clip", "loss_args": {"clip_hi": 0.3}},
            "unknown parameter 'clip_hi' of loss 'clip'; did you mean 'clip_high'?",
        ),
        ({"advantage": "nope"}, "unknown advantage 'nope'; known: dr_grpo, gae"),
        ({"advantage": "dr_grpo", "advantage_args": {"x": 1}}, "it takes none"),
        ({"corrections": {"icepopp": {}}}, "did you mean 'icepop'?"),
        ({"engine_corrections": {"icepop": {"lo": 1}}}, "did you mean 'low'?"),
        ({"selection": {"zero_varianse": {}}}, "did you mean 'zero_variance'?"),
        ({"kl_estimator": "k9"}, "unknown kl_estimator 'k9'"),
        ({"loss": "grpo"}, "'grpo' is an advantage and no loss; set algorithm.advantage=grpo"),
        ({"loss": "gae"}, "'gae' is an advantage and no loss; set algorithm.advantage=gae"),
        ({"advantage": "topr"}, "'topr' is a loss and no advantage; set algorithm.loss=topr"),
        (
            {"loss": "truncated_token"},
            "'truncated_token' is a correction and no loss; set algorithm.corrections={truncated_token: {}}",
        ),
        ({"corrections": {"grpo": {}}}, "'grpo' is an advantage and no correction; set"),
        ({"los": "clip"}, "unknown key 'los' in AlgorithmConfig; did you mean 'loss'?"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest_one(fields, message):
    with pytest.raises(ConfigError) as raised:
        AlgorithmConfig.model_validate(fields)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"loss": "tis_reinforce", "loss_args": {"cap": -1}},
            "cap of loss 'tis_reinforce' must be > 0, got -1",
        ),
        ({"loss": "clip", "loss_args": {"clip_low": 2}}, "clip_low of loss 'clip' must be between 0 and 1"),
        (
            {"loss": "cispo", "loss_args": {"ratio_floor": 9}},
            "ratio_floor of loss 'cispo' must be at most ratio_cap",
        ),
        (
            {"corrections": {"icepop": {"low": 3, "high": 2}}},
            "low of correction 'icepop' must be at most high, got 3",
        ),
        ({"corrections": {"icepop": {"low": 6}}}, "must be at most high, got 6 and 5"),
        (
            {"engine_corrections": {"truncated_token": {"cap": 0}}},
            "cap of correction 'truncated_token' must be > 0",
        ),
        (
            {"advantage": "pass_at_k", "advantage_args": {"k": 0}},
            "k of advantage 'pass_at_k' must be >= 1, got 0",
        ),
        ({"advantage": "gae", "advantage_args": {"gamma": 1.5}}, "must be between 0 and 1, got 1.5"),
        (
            {"selection": {"overlong_penalty": {"margin": 0}}},
            "margin of selection 'overlong_penalty' must be > 0",
        ),
        (
            {"selection": {"overlong_penalty": {"max_length": 256}}},
            "must be at most max_length, got 4096 and 256",
        ),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "must be k2 or k3 where kl_coef > 0, got k1"),
    ],
)
def test_numbers_outside_their_range_are_refused(fields, message):
    with pytest.raises(ConfigError) as raised:
        AlgorithmConfig.model_validate(fields)
    assert message in str(raised.value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["kl_coef", "entropy_coef", "value_clip", "loss_args"])
def test_infinities_and_nan_are_refused(field, value):
    given = {"cap": value} if field == "loss_args" else value
    with pytest.raises(ValidationError, match="finite"):
        AlgorithmConfig.model_validate({field: given})


def test_k1_is_for_measuring():
    assert AlgorithmConfig(kl_estimator="k1").kl_coef == 0
