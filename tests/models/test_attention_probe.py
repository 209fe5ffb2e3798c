import logging

import pytest
import torch
from torch.func import functional_call

from penstock.errors import UserError
from penstock.models.attention_probe import check_attention, own_logprobs
from tests.models import families


def own(twin, sequences):
    return [own_logprobs(twin, sequence) for sequence in sequences]


def without_windows(twin, sequences):
    """An attention that has never heard of windows."""
    twin.config.sliding_window = 1000
    return own(twin, sequences)


def test_the_models_own_attention_passes():
    check_attention(families.exaone4(), max_context=1 << 20, ours=own, doing="served")


def test_what_differs_past_a_limit_is_refused_with_the_context_that_is_right():
    message = (
        r"Exaone4 can't be served with contexts of 8000 tokens: the model has a sliding window of 4096 tokens, and "
        r"past that our attention differs from the model's own \(off by [\d.]+ nats .*\); set engine.max_context to at most 4096"
    )
    with pytest.raises(UserError, match=message):
        check_attention(families.exaone4(), max_context=8000, ours=without_windows, doing="served")
    check_attention(families.exaone4(), max_context=4096, ours=without_windows, doing="served")


def test_what_differs_always_is_refused():
    with pytest.raises(
        UserError,
        match=r"^Llama can't be trained: our attention differs from the model's own \(off by 1 nats",
    ):
        check_attention(
            families.llama(),
            max_context=64,
            ours=lambda twin, sequences: [each + 1 for each in own(twin, sequences)],
            doing="trained",
        )


def without_gradient_of(name):
    def ours(twin, sequences):
        weights = {
            each: weight.detach() if each == name else weight for each, weight in twin.named_parameters()
        }
        return own(lambda **inputs: functional_call(twin, weights, (), inputs), sequences)

    return ours


def test_a_gradient_that_differs_is_refused_by_its_parameter():
    name = "model.layers.0.self_attn.k_proj.weight"
    message = (
        r"^Llama can't be trained: our attention differs from the model's own \(the gradient of "
        rf"{name} is off by 1 of its norm in a small random model of its config\); choose another model$"
    )
    with pytest.raises(UserError, match=message):
        check_attention(families.llama(), max_context=64, ours=without_gradient_of(name), doing="trained")
    check_attention(families.llama(), max_context=64, ours=without_gradient_of(name), doing="served")


def test_gradients_are_made_only_for_training():
    def watching(twin, sequences):
        seen.append(torch.is_grad_enabled())
        return own(twin, sequences)

    seen = []
    for doing in ("served", "trained"):
        check_attention(families.llama(), max_context=64, ours=watching, doing=doing)
    assert seen == [False, True]


def test_tokens_that_were_not_computed_are_not_compared():
    def some(twin, sequences):
        return [
            torch.full_like(each, torch.nan).index_copy(0, torch.tensor([1]), each[1:2])
            for each in own(twin, sequences)
        ]

    check_attention(families.llama(), max_context=64, ours=some, doing="served")


def test_an_attention_that_gives_nothing_but_nan_is_refused():
    def nothing(twin, sequences):
        return [torch.full_like(each, torch.nan) for each in own(twin, sequences)]

    with pytest.raises(UserError, match=r"^Llama can't be served: .* \(off by inf nats"):
        check_attention(families.llama(), max_context=64, ours=nothing, doing="served")


def test_a_model_of_which_no_twin_can_be_made_is_not_refused_but_told(caplog):
    config = families.llama()
    config.hidden_act = "no such function"
    said = []
    check_attention(config, max_context=64, ours=own, doing="served", say=said.append)
    (line,) = said
    assert line.startswith(
        "the attention of Llama was not compared with its own: no small model could be made"
    )
    with caplog.at_level(logging.WARNING):
        check_attention(config, max_context=64, ours=own, doing="served")
    assert line in caplog.text
