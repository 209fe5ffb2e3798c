from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from penstock.models.saving import save_model


def tiny(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_written_in_the_format_that_they_came_in(tmp_path: Path, tied: bool) -> None:
    model = tiny(tied=tied)
    save_model(model, tmp_path, torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in stored) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.dtype == torch.bfloat16
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(loaded.get_parameter(name), weight.to(torch.bfloat16)), name


def test_without_a_format_the_model_is_saved_as_it_is(tmp_path: Path) -> None:
    save_model(tiny(tied=False), tmp_path, None)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
