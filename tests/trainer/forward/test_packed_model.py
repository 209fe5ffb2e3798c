import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Ernie4_5_MoeConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.errors import UserError
from penstock.trainer.forward.checkpointing import RECOMPILE_LIMIT
from penstock.trainer.forward.dummy_batch import dummy_batch
from penstock.trainer.forward.packed_model import PackedModel, check_packed_attention
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.forward.value_head import ValueHead
from penstock.trainer.step.packing import plan_step
from tests.models import families
from tests.trainer.builders import SIZES, VOCAB, make_groups, tiny_model

SMALL = {key: value for key, value in SIZES.items() if key not in ("head_dim", "initializer_range")}
CONFIGS = {
    "neox": GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ),
    "qwen2": Qwen2Config(**SMALL),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0),
    "gpt-oss, with sinks": GptOssConfig(
        **SMALL,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "qwen3-moe": Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "bloom, not behind the interface": BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "lfm2, with convolutions": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
}
ONE_AT_A_TIME = {"bloom, not behind the interface", "lfm2, with convolutions"}


def make_model(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def plain_logprobs(model, row):
    logprobs = []
    for sequence in row.sequences:
        ids = torch.from_numpy(sequence.sample.token_ids).long()[None]
        own = model(input_ids=ids).logits[0].float().log_softmax(-1)
        at = torch.from_numpy(sequence.sample.loss_mask).nonzero()[:, 0]
        logprobs.append(own[at - 1, ids[0, at]])
    return torch.cat(logprobs)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_any_causal_lm_gives_the_logprobs_and_gradients_of_plain_forwards(name, checkpointing, caplog):
    """What can't be packed is noticed, said, and run one sequence at a time."""
    model = make_model(name)
    row = PackedRow.of(plan_step(1, make_groups(1), micro_batch_tokens=1000)[0].micro_batches[0])
    assert len(row.lengths) == 6
    want = plain_logprobs(model, row)
    direction = torch.linspace(-1, 1, len(want))
    theirs = torch.autograd.grad((want * direction).sum(), list(model.parameters()))
    with caplog.at_level(logging.WARNING, logger="penstock"):
        policy = PackedModel(model, chunk_tokens=16, checkpointing=checkpointing)
    assert ("one at a time" in caplog.text) == (name in ONE_AT_A_TIME)
    assert policy.shares_prefixes == (name not in ONE_AT_A_TIME)
    got = policy(row).logprobs
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((got * direction).sum(), list(model.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3)


def test_value_head_reads_the_state_that_predicts_each_token():
    model = make_model("gpt2")
    head = ValueHead(32)
    torch.nn.init.normal_(head.linear.weight)
    row = PackedRow.of(plan_step(1, make_groups(1), micro_batch_tokens=1000)[0].micro_batches[0])
    outputs = PackedModel(model, chunk_tokens=16, value_head=head)(row)
    first = row.sequences[0].sample
    start = int(first.loss_mask.argmax())
    ids = torch.from_numpy(first.token_ids).long()[None]
    alone = make_model("gpt2").base_model(input_ids=ids).last_hidden_state[0, start - 1]
    torch.testing.assert_close(outputs.values[0], head.linear(alone)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("checkpointing", "runs"), [("off", 1), ("selective", 2), ("full", 2)])
def test_checkpointing_recomputes_layers_without_dropout(checkpointing, runs):
    model = make_model("neox")
    policy = PackedModel(model, chunk_tokens=16, checkpointing=checkpointing)
    seen = []
    mlp = model.gpt_neox.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, inputs: seen.append(module.training))
    row = PackedRow.of(plan_step(1, make_groups(1), micro_batch_tokens=1000)[0].micro_batches[0])
    policy(row).logprobs.sum().backward()
    assert seen == [False] * runs


def test_compiled_layers_run_under_their_settings_in_whatever_thread(monkeypatch):
    """Newer versions of torch have settings of their own in every thread; the trainer builds in one and steps in
    another."""
    monkeypatch.setattr("penstock.trainer.forward.packed_model.compile_layers", lambda model: None)
    model = tiny_model("llama")
    seen = []

    def look(*_):
        settings = torch._dynamo.config
        seen.append((settings.recompile_limit, settings.specialize_float))

    usual = torch._dynamo.config.recompile_limit, torch._dynamo.config.specialize_float
    policy = PackedModel(model, chunk_tokens=16, compiled=True)
    model.get_input_embeddings().register_forward_hook(look)
    row = dummy_batch(VOCAB, 40, "cpu", longest=128, shared_prompts=True)
    with ThreadPoolExecutor(1) as other:
        other.submit(policy, row).result()
        assert other.submit(lambda: torch._dynamo.config.recompile_limit).result() == usual[0]
    assert seen == [(RECOMPILE_LIMIT, True)]
    assert usual == (torch._dynamo.config.recompile_limit, torch._dynamo.config.specialize_float)
    assert usual[0] < RECOMPILE_LIMIT


FAR = 1 << 20


@pytest.mark.parametrize(
    "config",
    [
        families.llama(),
        families.exaone4(),
        families.granite4(),
        families.gemma3n(),
        families.gemma4_shared(),
        families.gemma4_mixture(),
        Ernie4_5_MoeConfig(),  # has parameters without gradients
        Qwen3Config(),
        Gemma3TextConfig(),
        GptOssConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_past_every_limit_these_are_exact(config):
    check_packed_attention(config, FAR, say=pytest.fail)


def test_a_mask_that_is_learned_is_refused():
    with pytest.raises(UserError, match="^Doge can't be trained: our attention differs from the model's own"):
        check_packed_attention(families.doge(), 1024)


@pytest.mark.parametrize(
    ("config", "limit"),
    [(families.llama4(), 8192), (families.llama4_chunks(), 8192), (families.longrope(), 4096)],
    ids=["llama4", "llama4_chunks", "longrope"],
)
def test_these_are_exact_up_to_their_limit_and_refused_past_it(config, limit):
    check_packed_attention(config, limit)
    with pytest.raises(
        UserError, match=f"can't be trained with .* set engine.max_context to at most {limit}$"
    ):
        check_packed_attention(config, limit + 1)


def test_diffllama_is_exact():
    check_packed_attention(families.diffllama(), 1024)
