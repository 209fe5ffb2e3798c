import subprocess
import sys

import pytest
from transformers import CONFIG_MAPPING

from penstock.errors import UserError
from penstock.models.load import refusal
from penstock.models.support import check_family, refusal_by_config

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
    assert refusal(config) == refusal_by_config(config) == sentence
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        check_family(str(tmp_path))
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


def test_a_model_that_brings_its_own_code_is_not_judged_by_its_family():
    config = CONFIG_MAPPING["qwen2_vl"](auto_map={"AutoModelForCausalLM": "modeling.TextOnly"})
    assert refusal_by_config(config) is None


def test_the_controller_refuses_a_family_without_torch(tmp_path):
    CONFIG_MAPPING["qwen3_next"]().save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.errors import UserError\n"
        "from penstock.models.support import check_family\n"
        "try: check_family(sys.argv[1])\n"
        "except UserError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.startswith(
        "Qwen3NextForCausalLM can't be served: not all of its layers are plain attention"
    )
