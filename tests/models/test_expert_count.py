from pathlib import Path

from transformers import LlamaConfig, Qwen3MoeConfig

from penstock.models.expert_count import count_experts, num_experts_of
from tests.models.moe import CONFIGS, EXPERTS, moe_model


def test_the_number_of_experts_is_read_from_any_config() -> None:
    assert {family: num_experts_of(moe_model(family).config) for family in CONFIGS} == dict.fromkeys(
        CONFIGS, EXPERTS
    )
    assert num_experts_of(Qwen3MoeConfig(num_experts=1)) == 0
    assert num_experts_of(LlamaConfig()) == 0


def test_a_folder_is_enough(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_experts=6).save_pretrained(tmp_path)
    assert count_experts(str(tmp_path)) == 6
