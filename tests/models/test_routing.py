import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DbrxConfig, LlamaConfig

from penstock.errors import UserError
from penstock.models.routing import Recording, Replay, Routers, find_routers, scores_at
from tests.models.moe import CHOSEN, CONFIGS, EXPERTS, VOCAB, moe_model

DENSE_FIRST = {"deepseek-v3", "glm4-moe"}
TOKENS = torch.arange(24)[None] * 7 % VOCAB


def routers_of(model: nn.Module) -> Routers:
    routers = find_routers(model, lambda: model(input_ids=TOKENS[:, :1]))
    assert routers is not None
    routers.watch()
    return routers


def record(model: nn.Module, routers: Routers) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the ids (layers, tokens, k) that were chosen on the way."""
    recording = Recording(routers.shape.num_layers)
    with routers.observed_by(recording), torch.no_grad():
        logits = model(input_ids=TOKENS).logits
    return logits, torch.stack([ids for ids in recording.ids if ids is not None])


def gradients(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    logits = model(input_ids=TOKENS).logits
    loss = logits.float().log_softmax(-1)[0, :-1].gather(1, TOKENS[0, 1:, None]).sum()
    model.zero_grad()
    loss.backward()
    return logits.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("family", CONFIGS)
def test_one_choice_is_found_in_every_layer_with_experts(family: str) -> None:
    routers = routers_of(moe_model(family))
    dense = family in DENSE_FIRST or (family == "ernie4.5-moe" and routers.shape.num_layers == 2)
    assert routers.shape.num_layers == (2 if dense else 3)
    assert (routers.shape.num_experts, routers.shape.top_k) == (EXPERTS, CHOSEN)


@pytest.mark.parametrize("family", CONFIGS)
def test_replaying_what_was_recorded_changes_no_bit(family: str) -> None:
    """Of logits and of gradients, the routers' own among them."""
    model = moe_model(family)
    routers = routers_of(model)
    free_logits, free = gradients(model)
    logits, ids = record(model, routers)
    torch.testing.assert_close(logits, free_logits, rtol=0, atol=0)
    replay = Replay(ids, torch.ones(TOKENS.shape[1], dtype=torch.bool))
    with routers.observed_by(replay):
        replayed_logits, replayed = gradients(model)
    assert torch.equal(replayed_logits, free_logits)
    assert int(replay.num_flipped) == 0
    for ours, theirs in zip(replayed, free, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)
    gates = [name for name, _ in model.named_parameters() if "gate.weight" in name or "router" in name]
    grads = dict(zip([name for name, _ in model.named_parameters()], replayed, strict=True))
    found = [grad for name in gates if (grad := grads[name]) is not None]
    assert found and all(bool(grad.abs().sum() > 0) for grad in found if grad.dim() == 2)


@pytest.mark.parametrize("family", CONFIGS)
def test_other_experts_are_taken_where_others_were_recorded(family: str) -> None:
    model = moe_model(family)
    routers = routers_of(model)
    free_logits, ids = record(model, routers)
    other = (ids + 1) % EXPERTS
    replay = Replay(other, torch.ones(TOKENS.shape[1], dtype=torch.bool))
    with routers.observed_by(replay):
        logits, found = gradients(model)
    assert float((logits - free_logits).abs().max()) > 0.01
    assert int(replay.num_flipped) > 0
    assert all(bool(grad.isfinite().all()) for grad in found if grad is not None)


def test_a_token_without_a_record_keeps_the_live_choice() -> None:
    model = moe_model("qwen3-moe")
    routers = routers_of(model)
    free_logits, ids = record(model, routers)
    known = torch.arange(TOKENS.shape[1]) >= 10
    with routers.observed_by(Replay((ids + 1) % EXPERTS, known)), torch.no_grad():
        logits = model(input_ids=TOKENS).logits
    torch.testing.assert_close(logits[:, :10], free_logits[:, :10], rtol=0, atol=1e-5)
    assert float((logits[:, 10:] - free_logits[:, 10:]).abs().min(dim=-1).values.max()) > 1e-3


def test_flips_are_counted_as_sets_over_layers_and_known_tokens() -> None:
    live = torch.tensor([[0, 1], [2, 3], [4, 5]])
    recorded = torch.stack([torch.tensor([[1, 0], [2, 4], [0, 1]])] * 2)
    replay = Replay(recorded, torch.tensor([True, True, False]))
    answered = [replay.choose(layer, live) for layer in (0, 1, 1)]  # layer 1 twice, as in recomputation
    assert answered[0].tolist() == [[1, 0], [2, 4], [4, 5]]
    assert int(replay.num_flipped) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("all_known", [True, False])
def test_an_answer_is_no_part_of_the_record(dtype: torch.dtype, all_known: bool) -> None:
    recorded = torch.tensor([[[1, 0], [2, 4]]], dtype=dtype)
    replay = Replay(recorded, torch.ones(2, dtype=torch.bool), all_known=all_known)
    answered = replay.choose(0, torch.tensor([[0, 1], [2, 3]]))
    assert (answered.dtype, answered.tolist()) == (torch.int64, [[1, 0], [2, 4]])
    answered.zero_()
    assert recorded.tolist() == [[[1, 0], [2, 4]]]


def test_records_of_another_length_are_an_error() -> None:
    model = moe_model("mixtral")
    routers = routers_of(model)
    _, ids = record(model, routers)
    replay = Replay(ids[:, :5], torch.ones(5, dtype=torch.bool))
    with (
        routers.observed_by(replay),
        pytest.raises(ValueError, match=r"shape \(24, 2\), and \(5, 2\) are recorded"),
    ):
        model(input_ids=TOKENS)


def test_routers_are_found_where_a_config_within_the_config_tells_of_experts() -> None:
    config = DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        vocab_size=VOCAB,
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": CHOSEN},
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    )
    routers = routers_of(AutoModelForCausalLM.from_config(config).eval())
    assert (routers.shape.num_layers, routers.shape.num_experts, routers.shape.top_k) == (2, EXPERTS, CHOSEN)


def test_a_dense_model_has_no_routers() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    assert find_routers(model, lambda: pytest.fail("it need not run")) is None


class TwiceChosen(nn.Module):
    """A router of Qwen3-MoE that asks twice."""

    def __init__(self, router: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = router, times
        self.weight = router.weight

    def forward(self, states: torch.Tensor) -> object:
        scores = states.reshape(-1, states.shape[-1]) @ self.weight.T
        chosen = [torch.topk(scores, CHOSEN)[1] for _ in range(self.times)]
        ids = chosen[0] if chosen else scores.argsort(dim=1, descending=True)[:, :CHOSEN]
        return scores, scores.gather(1, ids), ids


@pytest.mark.parametrize(("times", "found"), [(0, "none"), (2, "2 in model.layers.0")])
def test_routers_that_do_not_choose_once_are_refused_by_name(times: int, found: str) -> None:
    model = moe_model("qwen3-moe", num_hidden_layers=1)
    block = model.model.layers[0].mlp
    block.gate = TwiceChosen(block.gate, times)
    with pytest.raises(
        UserError, match=rf"Qwen3MoeForCausalLM's choice .* exactly one topk .* got {found}; set"
    ):
        find_routers(model, lambda: model(input_ids=TOKENS[:, :1]))


def test_a_layer_with_experts_whose_choice_is_not_seen_is_refused() -> None:
    model = moe_model("qwen3-moe", num_hidden_layers=2)
    block = model.model.layers[1].mlp
    block.gate = TwiceChosen(block.gate, 0)
    with pytest.raises(UserError, match=r"2 layers with experts must .* got 1 in model.layers.0"):
        find_routers(model, lambda: model(input_ids=TOKENS[:, :1]))


def test_scores_of_chosen_experts_are_a_gather_that_no_compiler_fuses() -> None:
    """With its gradient, also where an id comes twice."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, EXPERTS, generator=generator, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 0], [3, 3], [EXPERTS - 1, 2], [2, 1]])
    weights = torch.randn(5, 2, generator=generator)
    ours, theirs = scores_at(scores, ids), scores.gather(1, ids)
    assert torch.equal(ours, theirs)
    found, expected = (torch.autograd.grad((each * weights).sum(), scores)[0] for each in (ours, theirs))
    assert torch.equal(found, expected)
    torch.library.opcheck(scores_at, (scores, ids))
