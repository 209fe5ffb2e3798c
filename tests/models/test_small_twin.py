import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

from penstock.models.small_twin import MAX_PARAMETERS, Limit, limits_of, small_config, small_twin
from tests.models import families

FAR = 1 << 30


def test_limits_are_those_of_the_config():
    assert limits_of(families.llama()) == []
    assert limits_of(families.exaone4()) == [Limit("a sliding window", 4096)]
    assert {str(limit) for limit in limits_of(families.llama4())} == {
        "attention chunks of 8192 tokens",
        "attention temperatures of 8192 tokens",
    }
    assert [limit.tokens for limit in limits_of(families.longrope())] == [4096]


def test_every_kind_of_layer_is_there_once_or_more():
    config = families.exaone4()
    assert config.layer_types[:4] == ["sliding_attention"] * 3 + ["full_attention"]
    assert small_config(config, FAR).layer_types == [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]


def test_limits_are_near_where_the_context_reaches_them_and_far_where_not():
    assert small_config(families.exaone4(), 5000).sliding_window == 5
    assert small_config(families.exaone4(), 4096).sliding_window == 64
    near, far = (small_config(families.longrope(), context) for context in (4097, 4096))
    assert near.rope_parameters["original_max_position_embeddings"] == 8
    assert far.rope_parameters["original_max_position_embeddings"] == 64


def test_layers_that_share_keys_stay_beside_those_that_own_them():
    config = small_config(families.gemma3n(), FAR)
    # The first of each kind: with sparse activations, without, and with the keys of an earlier layer.
    kinds = ["sliding_attention", "full_attention"]
    assert config.layer_types == ["sliding_attention", *kinds, *kinds, *kinds]
    assert config.activation_sparsity_pattern == [0.95] * 3 + [0.0] * 4
    assert config.num_kv_shared_layers == 2
    assert config.intermediate_size == [48] * 7


def test_settings_of_single_layers_stay_with_their_layers():
    config = small_config(families.gemma4_mixture(), FAR)
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    layers = [(each.head_dim, each.num_key_value_heads) for each in config.per_layer_config]
    assert layers == [(256, 2), (256, 2), (512, 2)]
    assert (config.num_experts, config.top_k_experts) == (4, 2)


@pytest.mark.parametrize(
    "config",
    [
        families.llama(),
        families.llama4(),
        families.longrope(),
        GptOssConfig(),
        Qwen3MoeConfig(),
        families.gemma4_shared(),
    ],
    ids=lambda config: config.model_type,
)
def test_a_twin_is_small_random_and_the_same_for_a_seed(config):
    state = torch.random.get_rng_state()
    one, two, other = (small_twin(config, FAR, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sum(weight.numel() for weight in one.parameters()) <= MAX_PARAMETERS
    assert all(weight.any() for weight in one.parameters())
    ids = torch.arange(20)[None]
    logits = [model(input_ids=ids, use_cache=False).logits for model in (one, two, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert logits[0].std() > 0.1  # far enough from uniform to see a difference
