"""A model is split as the layout says, and one that says something else after it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
)

from penstock.errors import UserError
from penstock.records import ScoredGroup
from penstock.trainer.config import ParallelConfig, TrainerConfig
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.parallel.local_shards import local_shard
from penstock.trainer.parallel.process_ranks import leave_ranks
from penstock.trainer.parallel.split_model import split_matrices, split_model
from tests.trainer.builders import SIZES, make_groups, tiny_model
from tests.trainer.parallel.layout_gradients import Case, errors_on_rank, join
from tests.trainer.parallel.rank_processes import on_ranks, rank_device
from tests.trainer.parallel.test_fully_sharded import LOSS_CASES, OTHER_CASES
from tests.trainer.test_algorithms import near_policy

pytestmark = pytest.mark.processes


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
            "trainer.parallel.tensor must be 1 for LlamaForCausalLM: split by transformers' plan, its "
            "logprobs differ by "
        )


PLAIN: list[Case] = [({"loss": "clip"}, {})]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        {"tensor": 2, "shard": 2},
        {"tensor": 2, "data": 2},
        {"tensor": 2, "context": 2},
        {"tensor": 4},
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(sizes: dict[str, int]) -> None:
    """Of every loss, and the norm that clips them. The vocabulary of 61 does not divide by 2. Weights are small:
    sums in another order then change a gradient by 1e-6, with larger ones by up to 6e-6."""
    size = ParallelConfig(**sizes).num_ranks
    # Four processes on two cores wait for each other at every collective, so they have fewer of them.
    changes = {"num_hidden_layers": 2 if size == 2 else 1, "num_key_value_heads": max(2, sizes["tensor"])}
    model = tiny_model("llama", initializer_range=0.1, **changes)
    groups = near_policy(model, 3, shape=(3, 4, 2) if size == 2 else (3, 2))
    cases = [*LOSS_CASES, *OTHER_CASES] if size == 2 else LOSS_CASES
    for found in on_ranks(size, errors_on_rank, [sizes], model, groups, cases):
        assert len(found) == len(cases)
        assert {case: error for case, error in found.items() if not error <= 1e-5} == {}


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_tied_embeddings_and_norms_of_heads_have_one_gradient(family: str) -> None:
    """Of several micro-batches: what they add to a norm that each rank has for its own heads is summed once.
    Gemma's final soft-cap acts on each rank's own logits."""
    model = tiny_model(family)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    groups = near_policy(model, 5, shape=(3, 3))
    for found in on_ranks(2, errors_on_rank, [{"tensor": 2}], model, groups, PLAIN):
        assert max(found.values()) <= 1e-5


FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "mistral": (MistralConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "gemma3": (Gemma3TextConfig, {"query_pre_attn_scalar": 8, "sliding_window": 5}),
    "phi": (PhiConfig, {}),
    "phi3": (Phi3Config, {"pad_token_id": 0}),
    "olmo2": (Olmo2Config, {}),
    "granite": (GraniteConfig, {}),
    "cohere": (CohereConfig, {}),
}


def errors_of_families(
    rank: int, folder: Path, models: dict[str, Any], groups: list[ScoredGroup]
) -> dict[str, float]:
    found = {}
    for name, model in models.items():
        inside = folder / name
        inside.mkdir(exist_ok=True)
        found[name] = max(errors_on_rank(rank, inside, [{"tensor": 2}], model, groups, PLAIN).values())
    return found


def test_plans_of_many_families_give_the_gradient_of_one_process() -> None:
    """Beside Llama, Qwen3 and Gemma 2, which have tests of their own."""
    models = {}
    for name, (kind, more) in FAMILIES.items():
        torch.manual_seed(0)
        config = kind(**SIZES | {"initializer_range": 0.1, "num_hidden_layers": 1} | more)
        models[name] = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    groups = make_groups(5, shape=(3, 2))
    for found in on_ranks(2, errors_of_families, models, groups):
        assert found.keys() == models.keys()
        assert {name: error for name, error in found.items() if not error <= 1e-5} == {}


def test_gradients_in_bfloat16_are_near() -> None:
    """Neither halved, doubled nor lost: sums over ranks are rounded, and nothing else differs."""
    model = tiny_model("qwen3")
    groups = near_policy(model, 3, shape=(3, 4, 2))
    cases: list[Case] = [({"loss": "clip"}, {"dtype": "bfloat16"})]
    for found in on_ranks(2, errors_on_rank, [{"tensor": 2}], model, groups, cases):
        assert max(found.values()) <= 0.1


def ways_to_tie(rank: int, folder: Path) -> tuple[bool, str]:
    ranks = join(rank, folder, ParallelConfig(tensor=2))
    model: Any = tiny_model("qwen3").to(rank_device(rank))
    split_matrices(model, ranks.mesh["tensor"])
    is_one = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    other: Any = tiny_model("qwen3").to(rank_device(rank))
    other._tp_plan["model.embed_tokens"] = "embedding_colwise"
    with pytest.raises(UserError) as refusal:
        split_matrices(other, ranks.mesh["tensor"])
    leave_ranks()
    return is_one, str(refusal.value)


def test_a_weight_with_two_names_stays_one() -> None:
    for is_one, sentence in on_ranks(2, ways_to_tie):
        assert is_one
        assert sentence == (
            "trainer.parallel.tensor must be 1 for Qwen3ForCausalLM: transformers' plan splits weights in two "
            "ways that are one weight; use trainer.parallel.shard"
        )
