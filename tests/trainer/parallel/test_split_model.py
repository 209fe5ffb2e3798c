"""A model is split as the layout says, and one that says something else after it is refused."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.parallel.local_shards import local_shard
from penstock.trainer.parallel.process_ranks import leave_ranks
from penstock.trainer.parallel.split_model import split_model
from tests.trainer.builders import tiny_model
from tests.trainer.parallel.layout_gradients import join
from tests.trainer.parallel.rank_processes import on_ranks

pytestmark = pytest.mark.xdist_group("processes")


def split(rank: int, folder: Path) -> tuple[dict[str, Any], str]:
    ranks = join(rank, folder, ParallelConfig(tensor=2))
    model: Any = tiny_model("llama")
    split_model(PackedModel(model, chunk_tokens=8), ranks, TrainerConfig(), "cpu")
    found = {
        name: (local_shard(tensor, ranks.layout).start, tuple(local_shard(tensor, ranks.layout).values.shape))
        for name, tensor in model.named_parameters()
    }
    wrong: Any = tiny_model("llama")
    wrong._tp_plan["model.layers.*.post_attention_layernorm"] = "all_reduce"  # it is whole on every rank
    with pytest.raises(UserError) as refusal:
        split_model(PackedModel(wrong, chunk_tokens=8), ranks, TrainerConfig(), "cpu")
    leave_ranks()
    return found, str(refusal.value)


def test_ranks_split_matrices_by_the_plan_and_refuse_a_wrong_one() -> None:
    for rank, (found, sentence) in enumerate(on_ranks(2, split)):
        inside = "model.layers.0"
        assert found[f"{inside}.self_attn.q_proj.weight"] == ((16 * rank, 0), (16, 32))
        assert found[f"{inside}.self_attn.k_proj.weight"] == ((8 * rank, 0), (8, 32))
        assert found[f"{inside}.mlp.down_proj.weight"] == ((0, 24 * rank), (32, 24))
        assert found[f"{inside}.input_layernorm.weight"] == ((0,), (32,))
        assert found["lm_head.weight"] == ((31 * rank, 0), (31 - rank, 32))
        assert sentence.startswith(
            "trainer.parallel.tensor must be 1 for LlamaForCausalLM: split by transformers' plan, its logprobs differ by "
        )
