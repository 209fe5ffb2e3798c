import pytest
from transformers import Gemma3TextConfig, GptOssConfig, Qwen3Config

from penstock.engines.embedded.paged_attention_check import check_paged_attention
from penstock.errors import UserError
from tests.models import families

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
        Qwen3Config(),
        Gemma3TextConfig(),
        GptOssConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_past_every_limit_these_are_exact(config, caplog):
    check_paged_attention(config, FAR)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("config", "limit"),
    [(families.llama4(), 8192), (families.llama4_chunks(), 8192), (families.longrope(), 4096)],
    ids=["llama4", "llama4_chunks", "longrope"],
)
def test_these_are_exact_up_to_their_limit_and_refused_past_it(config, limit):
    check_paged_attention(config, limit)
    with pytest.raises(
        UserError, match=f"can't be served with .* set engine.max_context to at most {limit}$"
    ):
        check_paged_attention(config, limit + 1)


@pytest.mark.parametrize(("config", "name"), [(families.diffllama(), "DiffLlama"), (families.doge(), "Doge")])
def test_another_attention_is_refused(config, name):
    with pytest.raises(
        UserError, match=f"^{name} can't be served: our attention differs from the model's own"
    ):
        check_paged_attention(config, 1024)
