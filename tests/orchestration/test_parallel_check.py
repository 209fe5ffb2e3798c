from typing import Any, ClassVar

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from penstock.errors import ConfigError
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.parallel_check import check_ranks

DENSE = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)


class PackedPlan(LlamaConfig):  # type: ignore[misc]
    base_model_tp_plan: ClassVar[dict[str, str]] = {"layers.*.mlp.gate_up_proj": "packed_colwise"}


def config(parallel: dict[str, int], **sections: Any) -> PenstockConfig:
    trainer = {"parallel": parallel}
    whole = {"tasks": {"source": "a.jsonl"}, "model": {"name": "m"}, "trainer": trainer, **sections}
    return PenstockConfig.model_validate(whole)


def test_sharded_ranks_over_a_collective_are_fine() -> None:
    check_ranks(config({"shard": 2, "data": 2}, sync={"transport": "collective"}), DENSE)


def test_sequences_of_a_mixture_are_not_split() -> None:
    model = Qwen3MoeConfig(num_experts=4, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError) as refusal:
        check_ranks(config({"context": 2}), model)
    assert str(refusal.value) == (
        "a mixture of experts can be trained with trainer.parallel.data and shard, got context=2"
    )
    check_ranks(config({"data": 2, "shard": 2}), model)


@pytest.mark.parametrize(
    ("model", "sections", "sentence"),
    [
        (
            Qwen3MoeConfig(num_experts=4, num_attention_heads=4, num_key_value_heads=2),
            {},
            "a mixture of experts can be trained with trainer.parallel.data and shard, got tensor=2",
        ),
        (
            GPT2Config(),
            {},
            "trainer.parallel.tensor must be 1 for gpt2, for which transformers has no plan, got tensor=2; use "
            "trainer.parallel.shard",
        ),
        (
            PackedPlan(),
            {},
            "trainer.parallel.tensor must be 1 for llama, whose plan splits weights by packed_colwise, got tensor=2; use "
            "trainer.parallel.shard",
        ),
        (
            DENSE,
            {"model": {"name": "m", "lora": {}}},
            "an adapter can be trained with trainer.parallel.data, shard and context, got tensor=2",
        ),
        (
            DENSE,
            {"trainer": {"parallel": {"tensor": 2}, "compile": True}},
            "trainer.compile must be off with trainer.parallel.tensor, got on (tensor=2)",
        ),
    ],
)
def test_what_can_not_split_its_matrices_is_refused(
    model: Any, sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_ranks(config({"tensor": 2}, **sections), model)
    assert str(refusal.value) == sentence
    check_ranks(config({"tensor": 2, "shard": 2}), DENSE)
