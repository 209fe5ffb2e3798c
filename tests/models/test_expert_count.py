from pathlib import Path

from transformers import DbrxConfig, LlamaConfig, Qwen3MoeConfig

from penstock.models.expert_count import count_experts, num_experts_of
from tests.models.moe import CONFIGS, EXPERTS, moe_model


def test_the_number_of_experts_is_read_from_any_config() -> None:
    assert {family: num_experts_of(moe_model(family).config) for family in CONFIGS} == dict.fromkeys(
        CONFIGS, EXPERTS
    )
    assert num_experts_of(Qwen3MoeConfig(num_experts=1)) == 0
    assert num_experts_of(LlamaConfig()) == 0


def test_experts_are_found_in_a_config_within_the_config() -> None:
    assert num_experts_of(DbrxConfig(ffn_config={"moe_num_experts": 6})) == 6


def test_layers_may_have_other_numbers_of_experts() -> None:
    assert num_experts_of(LlamaConfig(num_experts=[1, 8, 16])) == 16
    assert num_experts_of(LlamaConfig(num_experts=[1, 1])) == 0


def test_a_name_that_nobody_has_seen_does_not_pass_for_a_dense_model() -> None:
    assert num_experts_of(LlamaConfig(num_ffn_experts=12)) == 12
    assert num_experts_of(LlamaConfig(num_ffn_experts=12, num_experts=4)) == 4
    assert num_experts_of(LlamaConfig(n_shared_experts=2, num_experts_per_tok=8, use_experts=True)) == 0


def test_a_folder_is_enough(tmp_path: Path) -> None:
    Qwen3MoeConfig(num_experts=6).save_pretrained(tmp_path)
    assert count_experts(str(tmp_path)) == 6
