import pytest
import torch

from benchmarks.mixtures import MIXTURES, count_parameters, make_mixture


def test_a_token_is_multiplied_with_its_own_experts() -> None:
    model = make_mixture("tiny-moe", "cpu", torch.float32)
    sizes = MIXTURES["tiny-moe"]
    expert = 3 * sizes["hidden_size"] * sizes["intermediate_size"] * sizes["num_hidden_layers"]
    total, active = count_parameters(model)
    assert total - active == expert * (sizes["num_experts"] - sizes["num_experts_per_tok"])


def test_olmoe_has_seven_billion_parameters_of_which_one_acts() -> None:
    from transformers import AutoModelForCausalLM, OlmoeConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(OlmoeConfig(**MIXTURES["olmoe"]))
    total, active = count_parameters(model)
    assert round(total / 1e9, 1) == 6.8
    assert round(active / 1e9, 1) == 1.2


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one of tiny-moe, olmoe, got '7b'"):
        make_mixture("7b", "cpu", torch.float32)
