import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Lfm2Config, LlamaConfig

from penstock.errors import UserError
from penstock.models.support import (
    RawConfig,
    check_supported,
    is_certainly_dense,
    load_config,
    read_config,
    refusal,
)

DENSE_GRANITE = {"num_hidden_layers": 2, "layer_types": ["attention"] * 2, "num_local_experts": 0}


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        ("llava", "LlavaForConditionalGeneration"),
        ("internvl", "InternVLForConditionalGeneration"),
        ("voxtral", "VoxtralForConditionalGeneration"),
    ],
)
def test_vision_models_are_refused_in_a_sentence_of_ours(family, model, tmp_path):
    config = CONFIG_MAPPING[family]()
    sentence = (
        f"{model} can't be served: vision and audio models are not supported, and transformers does not load the "
        f"text part of {family} as a causal LM; choose a text model"
    )
    assert refusal(config) == sentence
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        check_supported(read_config(str(tmp_path)))
    assert str(error.value) == sentence


def test_layers_that_look_at_images_are_named():
    reason = refusal(CONFIG_MAPPING["mllama"]())
    assert (
        "MllamaForCausalLM can't be served: not all of its layers are plain attention (cross_attention)"
        in reason
    )


def test_image_classes_that_work_on_text_alone_are_not_refused():
    for family in ("gemma3", "gemma3n", "gemma4"):
        assert refusal(CONFIG_MAPPING[family]()) is None


def test_layers_count_and_not_the_class():
    """Granite-4.0's dense models share a class with its hybrid ones."""
    granite = CONFIG_MAPPING["granitemoehybrid"]
    assert refusal(granite(**DENSE_GRANITE)) is None
    mixed = refusal(granite(num_hidden_layers=2, layer_types=["attention", "mamba"]))
    assert "GraniteMoeHybridForCausalLM can't be served: not all of its layers are plain attention" in mixed
    assert "(linear_attention)" in mixed
    for old in ("layer_types", "layers_block_type"):
        raw = {"model_type": "granitemoehybrid", old: ["attention", "attention"]}
        assert refusal(RawConfig(**raw)) is None
        assert "(linear_attention)" in refusal(RawConfig(**{**raw, old: ["attention", "mamba"]}))


def test_a_model_that_brings_its_own_code_is_not_judged_by_its_family():
    config = CONFIG_MAPPING["qwen2_vl"](auto_map={"AutoModelForCausalLM": "modeling.TextOnly"})
    assert refusal(config) is None


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
        (CONFIG_MAPPING["recurrent_gemma"](), "recurrent"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "conv"),
    ],
)
def test_families_with_other_layers_are_refused_by_their_kind(config, kind):
    assert f"not all of its layers are plain attention ({kind})" in refusal(config)


@pytest.mark.parametrize("family", ["llama", "bamba", "falcon", "gemma3_text", "kimi_linear", "bert"])
def test_the_text_of_a_family_says_what_its_classes_say(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    uses_interface = hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    reason = refusal(RawConfig(model_type=family)) or "it can be served"
    expected = (
        f"{model_class.__name__} can't be served: not all of its layers are plain attention (some are recurrent)"
        if model_class._is_stateful
        else "it can be served"
        if uses_interface
        else f"{model_class.__name__} can't be served: its code in transformers does not use the attention interface"
    )
    assert reason.startswith(expected)


@pytest.mark.parametrize(
    "own", [{"auto_map": {"AutoConfig": "a.B"}}, {"model_type": "own"}, {"model_type": None}]
)
def test_a_model_with_code_of_its_own_is_left_to_that_code(own: dict[str, Any]) -> None:
    assert refusal(RawConfig(**{"model_type": "mamba", **own})) is None


def test_layers_of_the_language_model_within_are_looked_at() -> None:
    within = {"layer_types": ["full_attention", "linear_attention"]}
    reason = refusal(RawConfig(model_type="llama", text_config=within))
    assert reason is not None
    assert "not all of its layers are plain attention (linear_attention)" in reason


def test_a_config_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LlamaConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    config = read_config(str(tmp_path))
    assert config is not None
    assert (config.get_text_config().num_hidden_layers, config.model_type) == (3, "llama")  # type: ignore[attr-defined]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: tmp_path / file)
    assert vars(read_config("a/b") or object()) == vars(config)
    for broken in ("[1]", "{", "[" * 5000):
        (tmp_path / "config.json").write_text(broken)
        assert read_config(str(tmp_path)) is None
    monkeypatch.undo()
    assert read_config("a name/of/nothing") is None
    assert read_config("nobody/has-this") is None


@pytest.mark.parametrize(
    ("config", "is_dense"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "num_experts": 4}, False),
        ({"model_type": "mixtral"}, False),  # its class has a default
        ({"model_type": "own"}, False),
    ],
)
def test_a_model_is_certainly_dense_if_nothing_speaks_of_experts(
    config: dict[str, Any], is_dense: bool
) -> None:
    assert is_certainly_dense(RawConfig(**config)) is is_dense


def test_a_model_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model '.*none' could not be loaded \(no such folder here"):
        load_config(str(tmp_path / "none"))
