import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from penstock.models import attention
from penstock.trainer.forward.logprob_head import KeptIds, LogitShape, TokenHead
from penstock.trainer.forward.packed_attention import PackedAttention

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.4,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, logits_scaling=3.0),
}


def model_and_head(name, chunk=1024):
    torch.manual_seed(0)
    attention.register()
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="penstock").eval()
    backend = PackedAttention()
    attention.attach(model, backend)
    backend.set_lengths([6])
    head = TokenHead(model, chunk_tokens=chunk)
    head.verify(IDS, POSITIONS)
    return model, head


IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])
POSITIONS = torch.arange(6)[None]
TARGETS = torch.tensor([1, 7, 36, 0])
TEMPERATURE = torch.tensor([1.0, 0.5, 2.0, 0.7])
KEPT = KeptIds(offsets=torch.tensor([0, 3, 3, 5, 6]), ids=torch.tensor([1, 4, 30, 36, 2, 0]))


def plain(model, kept):
    """Logprobs and entropies from the model's full logits, row by row."""
    logits = model(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits[0, 1:5].float()
    logprobs, entropies = [], []
    for i in range(4):
        row = logits[i] / TEMPERATURE[i]
        ids = kept.ids[kept.offsets[i] : kept.offsets[i + 1]] if kept is not None else []
        chosen = row[ids] if len(ids) else row
        logprobs.append(row[TARGETS[i]] - chosen.logsumexp(0))
        full = chosen.log_softmax(0)
        entropies.append(-(full.exp() * full).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["all ids", "kept ids"])
def test_logprobs_entropy_and_gradients_equal_the_full_logits(name, chunk, kept):
    model, head = model_and_head(name, chunk)
    assert not head.uses_full_logits
    logprobs, entropy = head(head.states(IDS, POSITIONS)[1:5], TARGETS, TEMPERATURE, kept)
    want_logprobs, want_entropy = plain(model, kept)
    torch.testing.assert_close(logprobs, want_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    parameters = list(model.parameters())
    ours = torch.autograd.grad((logprobs * weights + entropy * weights.flip(0)).sum(), parameters)
    theirs = torch.autograd.grad((want_logprobs * weights + want_entropy * weights.flip(0)).sum(), parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_masking_to_one_id_gives_certainty():
    _, head = model_and_head("llama")
    only = KeptIds(offsets=torch.arange(5), ids=TARGETS)
    logprobs, entropy = head(head.states(IDS, POSITIONS)[1:5], TARGETS, TEMPERATURE, only)
    torch.testing.assert_close(logprobs, torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, torch.zeros(4), atol=1e-6, rtol=0)


def test_unknown_logit_processing_falls_back_to_the_full_logits(caplog):
    model, _ = model_and_head("llama")
    forward = model.forward

    def shifted(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * torch.linspace(0.5, 2, 37)
        return output

    model.forward = shifted
    head = TokenHead(model, chunk_tokens=2)
    with caplog.at_level(logging.WARNING):
        head.verify(IDS, POSITIONS)
    assert head.uses_full_logits
    assert "full logits" in caplog.text
    logprobs, _ = head(head.states(IDS, POSITIONS)[1:5], TARGETS, TEMPERATURE)
    want, _ = plain(model, None)
    torch.testing.assert_close(logprobs, want, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(logprobs.sum(), model.lm_head.weight)[0]
    theirs = torch.autograd.grad(want.sum(), model.lm_head.weight)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_full_logits_never_exist():
    """No tensor of (tokens × vocabulary) is saved for backward; only chunks are ever made."""
    _, head = model_and_head("llama", chunk=2)
    states = head.states(IDS, POSITIONS).detach().requires_grad_()
    saved = []

    def keep(tensor):
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(states, IDS[0], torch.ones(6))
    assert (6, 37) not in saved
    assert (2, 37) not in saved


def test_logit_shape_reads_the_config():
    assert LogitShape.of(CONFIGS["granite"]) == LogitShape(scale=pytest.approx(1 / 3))
    assert LogitShape.of(CONFIGS["cohere"]) == LogitShape(scale=0.25)
    assert LogitShape.of(CONFIGS["gemma2"]) == LogitShape(softcap=2.0)
    with pytest.raises(ValueError, match="chunk_tokens must be >= 1"):
        TokenHead(torch.nn.Identity(), chunk_tokens=0)
