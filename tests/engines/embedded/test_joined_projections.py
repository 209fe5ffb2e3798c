import torch
from torch import nn

from penstock.engines.embedded.joined_projections import JoinedLinear, join_projections
from tests.engines.embedded.tiny import make_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_joined_projections_give_the_same_logits_under_their_old_names():
    model = make_model("qwen2")
    names = [name for name, _ in model.named_parameters()]
    before = logits(model)
    assert join_projections(model) == 6  # attention and MLP of three layers
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names
    assert join_projections(model) == 0
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, JoinedLinear)
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.family.weight[32:].data_ptr()


def test_what_is_copied_into_a_parameter_is_what_is_multiplied():
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    join_projections(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    torch.testing.assert_close(logits(model), logits(other), atol=1e-5, rtol=1e-5)


def test_one_projection_can_be_asked_for_alone():
    model = make_model("llama")
    join_projections(model)
    attention = model.model.layers[0].self_attn
    states = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    expected = states @ attention.v_proj.weight.T
    torch.testing.assert_close(attention.v_proj(states), expected)


def test_models_without_such_families_are_left_alone():
    assert join_projections(make_model("gpt_neox")) == 0
    mixed = nn.Module()
    mixed.gate_proj, mixed.up_proj = nn.Linear(4, 4, bias=True), nn.Linear(4, 4, bias=False)
    assert join_projections(mixed) == 0
