import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from penstock.errors import UserError
from penstock.models.config import LoraConfig
from penstock.models.lora_targets import (
    adapter_shapes,
    all_linear,
    is_head_adapted,
    target_layers,
    weightless_model,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LLAMA = LlamaConfig(**SIZES)
MIXTURE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def outline_of(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def refusal(config: PreTrainedConfig, *targets: str) -> str:
    lora = LoraConfig(targets=targets) if targets else LoraConfig()
    with pytest.raises(UserError) as caught:
        adapter_shapes(outline_of(config), lora)
    return str(caught.value)


def test_all_linear_is_every_linear_layer_but_the_output_embedding() -> None:
    model = outline_of(LLAMA)
    ends = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert all_linear(model) == ends
    assert len(target_layers(model, LoraConfig())) == 2 * len(ends)


def test_shapes_are_those_of_the_layers() -> None:
    lora = LoraConfig(rank=3, targets=("k_proj", "model.layers.1.mlp.down_proj"), dora=True)
    assert adapter_shapes(outline_of(LLAMA), lora) == {
        "model.layers.0.self_attn.k_proj.lora_A.weight": (3, 32),
        "model.layers.0.self_attn.k_proj.lora_B.weight": (16, 3),
        "model.layers.0.self_attn.k_proj.lora_magnitude_vector": (16,),
        "model.layers.1.self_attn.k_proj.lora_A.weight": (3, 32),
        "model.layers.1.self_attn.k_proj.lora_B.weight": (16, 3),
        "model.layers.1.self_attn.k_proj.lora_magnitude_vector": (16,),
        "model.layers.1.mlp.down_proj.lora_A.weight": (3, 48),
        "model.layers.1.mlp.down_proj.lora_B.weight": (32, 3),
        "model.layers.1.mlp.down_proj.lora_magnitude_vector": (32,),
    }


def test_the_attention_of_a_mixture_can_be_adapted() -> None:
    shapes = adapter_shapes(outline_of(MIXTURE), LoraConfig(targets=("q_proj", "o_proj")))
    assert len(shapes) == 8


def test_a_name_that_matches_nothing_is_answered_with_those_that_do() -> None:
    sentence = refusal(LLAMA, "q_proj", "qkv_proj")
    assert "names 'qkv_proj', and LlamaForCausalLM has no such layer" in sentence
    assert "down_proj, gate_proj, k_proj" in sentence
    assert "no such layer" in refusal(LLAMA, "proj")


def test_embeddings_are_refused_but_for_an_output_embedding_of_its_own() -> None:
    tied = LlamaConfig(**SIZES, tie_word_embeddings=True)
    assert "one tensor" in refusal(tied, "q_proj", "lm_head")
    for config in (tied, LLAMA):
        assert "must not name 'embed_tokens' of LlamaForCausalLM" in refusal(config, "embed_tokens")
    model = outline_of(LLAMA)
    lora = LoraConfig(rank=3, targets=("lm_head", "q_proj"))
    assert adapter_shapes(model, lora)["lm_head.lora_B.weight"] == (61, 3)
    assert is_head_adapted(model, target_layers(model, lora))
    assert not is_head_adapted(model, target_layers(model, LoraConfig()))


def test_experts_are_refused() -> None:
    for name in ("experts", "gate_up_proj", "down_proj"):
        assert "adapters on experts are not supported" in refusal(MIXTURE, name)
    assert "name its other layers" in refusal(MIXTURE)


def test_other_layers_than_linear_ones_are_refused() -> None:
    assert "which is a LlamaMLP" in refusal(LLAMA, "mlp")
    gpt2 = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4)
    assert "which is a Conv1D" in refusal(gpt2, "c_attn")
    assert "has no linear layers" in refusal(gpt2)


def test_a_quantised_base_is_refused() -> None:
    model = outline_of(LLAMA)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UserError, match="quantised"):
        adapter_shapes(model, LoraConfig())


def test_a_model_without_weights_takes_no_memory(tmp_path) -> None:
    LLAMA.save_pretrained(tmp_path)
    model = weightless_model(str(tmp_path))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
