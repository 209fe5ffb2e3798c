from transformers import Gemma4TextConfig, GPT2Config, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

from penstock.bench.shapes import SHAPES
from penstock.models.outline import Outline, outline


def test_a_models_sizes_without_its_weights() -> None:
    found = outline(Qwen2Config(**SHAPES["1.5b"]))
    assert found.kv_per_token == 2 * 28 * 2 * 128
    assert found == Outline(
        num_parameters=1_543_714_304,
        num_layers=28,
        hidden=1536,
        queries=12 * 128,
        keys=2 * 128,
        intermediate=8960,
        vocabulary=151936,
    )


def test_other_families_name_things_differently() -> None:
    small = outline(GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    assert (small.hidden, small.queries, small.keys) == (16, 16, 16)
    assert (small.intermediate, small.kv_per_token) == (64, 2 * 2 * 16)
    experts = outline(
        Qwen3MoeConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        )
    )
    assert (experts.intermediate, experts.queries, experts.kv_per_token) == (48, 16, 16)


def test_layers_that_differ_count_as_the_widest() -> None:
    sizes = {"vocab_size": 20, "hidden_size": 16, "vocab_size_per_layer_input": 20, "intermediate_size": 8}
    layers = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**sizes, num_hidden_layers=2, layer_types=layers, head_dim=4, global_head_dim=8)
    found = outline(config)
    assert (found.queries, found.keys) == (8 * 8, 4 * 8)


def test_experts_that_all_tokens_go_through_count_too() -> None:
    shared = outline(
        Qwen2MoeConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
        )
    )
    assert shared.intermediate == 2 * 24 + 40
