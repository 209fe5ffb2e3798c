import pytest

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
        ({"los": "clip"}, "unknown key 'los' in AlgorithmConfig; did you mean 'loss'?"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest_one(fields, message):
    with pytest.raises(ConfigError) as raised:
        AlgorithmConfig.model_validate(fields)
    assert message in str(raised.value)
