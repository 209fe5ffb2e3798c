import logging

import pytest
import torch
from torch import nn

from penstock.engines.embedded.float32_logits import Float32Linear, keep_logits_in_float32
from tests.engines.embedded.tiny import make_model


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
    assert "its head is no linear layer but Float32Linear" in caplog.text
