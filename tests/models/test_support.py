import pytest
from transformers import CONFIG_MAPPING, Lfm2Config

from penstock.errors import UserError
from penstock.models.load import load_model
from penstock.models.support import refusal


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "stablelm", "gpt2", "llama4_text"]
)
def test_nothing_speaks_against_attention_behind_the_interface(family):
    assert refusal(CONFIG_MAPPING[family]()) is None


@pytest.mark.parametrize("family", ["falcon", "gpt_neo", "mpt", "bloom"])
def test_families_without_the_interface_are_refused_by_name(family):
    reason = refusal(CONFIG_MAPPING[family]())
    assert "its code in transformers does not use the attention interface" in reason
    assert reason.endswith(f"not {family}")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (CONFIG_MAPPING["mamba"](), "linear_attention"),
        (CONFIG_MAPPING["jamba"](), "linear_attention"),
        (CONFIG_MAPPING["qwen3_next"](), "linear_attention"),
        (CONFIG_MAPPING["recurrent_gemma"](), "some are recurrent"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "conv"),
    ],
)
def test_families_with_other_layers_are_refused_by_their_kind(config, kind):
    assert f"not all of its layers are plain attention ({kind})" in refusal(config)


def test_a_model_is_refused_before_its_weights_are_read(tmp_path):
    CONFIG_MAPPING["falcon"]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="FalconForCausalLM can't be served"):
        load_model(str(tmp_path))
