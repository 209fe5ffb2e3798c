import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.embedded.model_preparation import compile_layers
from penstock.engines.embedded.model_runner import ModelRunner
from penstock.errors import UserError
from tests.engines.embedded.tiny import make_model


def test_the_cache_takes_what_full_batches_need_within_its_bound() -> None:
    small = ModelRunner(make_model(), EmbeddedConfig(max_batch=3, block_size=16))
    assert small.num_blocks == 3 * 128 // 16
    bytes_per_block = 16 * 4 * 3 * 2 * (8 + 8)
    bound = ModelRunner(
        make_model(), EmbeddedConfig(max_batch=3, block_size=16, cache_gb=5.5 * bytes_per_block / 1e9)
    )
    assert bound.num_blocks == 5
    told = ModelRunner(make_model(), EmbeddedConfig(kv_tokens=100, block_size=16))
    assert told.num_blocks == 6


def test_the_context_is_the_models_unless_shorter() -> None:
    assert ModelRunner(make_model(), EmbeddedConfig()).max_context == 128
    assert ModelRunner(make_model(), EmbeddedConfig(), max_context=50).max_context == 50
    with pytest.raises(UserError, match="max_context must be <= 128, the model's own limit, got 129"):
        ModelRunner(make_model(), EmbeddedConfig(), max_context=129)


def test_a_model_with_other_layers_than_attention_is_refused() -> None:
    config = MambaConfig(vocab_size=20, hidden_size=16, state_size=4, num_hidden_layers=2)
    with pytest.raises(UserError, match="every layer has attention"):
        ModelRunner(MambaForCausalLM(config), EmbeddedConfig(), max_context=32)


def test_learned_positions_work_too() -> None:
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    runner = ModelRunner(GPT2LMHeadModel(config), EmbeddedConfig())
    assert runner.max_context == 32


def test_an_8_bit_cache_needs_a_gpu() -> None:
    with pytest.raises(
        UserError, match="engine.embedded.kv_dtype=float8 needs a GPU, and the engine runs on cpu"
    ):
        ModelRunner(make_model(), EmbeddedConfig(kv_dtype="float8"))


def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(make_model(), EmbeddedConfig())
    runner.device = torch.device("cuda")
    monkeypatch.setattr("penstock.engines.embedded.model_runner.has_triton", lambda: False)
    with pytest.raises(UserError, match=r"needs triton: pip install 'penstock\[gpu\]'"):
        runner.open_device(EmbeddedConfig(), {"policy": 0})


def test_a_second_engine_of_a_model_begins_with_layers_that_are_not_compiled() -> None:
    """Its probe would compile each layer anew, up to torch's limit, after which torch compiles none."""
    model = make_model()
    compile_layers(model, int(model.config.num_hidden_layers))
    assert any(module._compiled_call_impl is not None for module in model.modules())
    ModelRunner(model, EmbeddedConfig(max_batch=2), max_context=32)
    assert all(module._compiled_call_impl is None for module in model.modules())
