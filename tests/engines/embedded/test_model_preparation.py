import logging

import pytest
import torch
from torch import nn

from penstock.engines.embedded import model_preparation
from penstock.engines.embedded.model_preparation import (
    Float32Linear,
    keep_logits_in_float32,
    set_expert_matmuls,
)
from tests.engines.embedded.tiny import make_model
from tests.models.moe import CONFIGS, moe_model


def with_head(dtype, *, bias=False):
    """Logits of about ±20, as real models have."""
    model = make_model().to(dtype)
    torch.manual_seed(0)
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=bias, dtype=dtype)
    with torch.no_grad():
        head.weight *= 100
    model.set_output_embeddings(head)
    return model, head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_not_rounded(dtype, bias):
    model, head = with_head(dtype, bias=bias)
    states = torch.randn(1, 5, head.in_features).to(dtype)
    exact = states.double() @ head.weight.detach().double().T + (head.bias.detach().double() if bias else 0)
    weight = head.weight
    keep_logits_in_float32(model)
    logits = head(states).detach()
    assert (logits.dtype, logits.shape) == (torch.float32, (1, 5, head.out_features))
    torch.testing.assert_close(logits.double(), exact, atol=1e-4, rtol=1e-6)
    assert float((exact.to(dtype) - exact).abs().max()) > 1e-3  # what rounding would have done
    assert model.get_output_embeddings().weight is weight
    assert "lm_head.weight" in dict(model.named_parameters())


def test_a_model_in_float32_is_left_alone():
    model, head = with_head(torch.float32)
    keep_logits_in_float32(model)
    assert type(head) is nn.Linear


def test_a_head_of_another_kind_is_left_alone_and_named(caplog):
    model, _ = with_head(torch.bfloat16)
    model.set_output_embeddings(Float32Linear(4, 4))
    with caplog.at_level(logging.WARNING):
        keep_logits_in_float32(model)
    assert "its output head is not a linear layer but Float32Linear" in caplog.text


@pytest.mark.parametrize("family", CONFIGS)
def test_what_needs_the_host_is_never_chosen(family: str) -> None:
    model = moe_model(family).bfloat16()
    model.set_experts_implementation("eager")
    set_expert_matmuls(model, most_tokens=8192)
    assert model.config._experts_implementation == "grouped_mm"


def test_weights_are_copied_for_each_token_where_that_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the grouped kernel asks the host. An expert's largest matrix has 64 × 32 values, a token two experts."""
    model = moe_model("olmoe")
    monkeypatch.setattr(model_preparation, "COPIED_BYTES", 10 * 2 * 64 * 32 * 4)
    set_expert_matmuls(model, most_tokens=11)
    assert model.config._experts_implementation == "grouped_mm"
    set_expert_matmuls(model, most_tokens=10)
    assert model.config._experts_implementation == "batched_mm"


def test_a_dense_model_stays_as_it_is() -> None:
    model = make_model("llama")
    before = model.config._experts_implementation
    set_expert_matmuls(model, most_tokens=4)
    assert model.config._experts_implementation == before


@torch.no_grad()
def test_both_ways_give_the_same() -> None:
    model, ids = moe_model("qwen3-moe"), torch.arange(9)[None]
    model.set_experts_implementation("eager")
    want = model(input_ids=ids).logits
    for way in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(way)
        torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)
