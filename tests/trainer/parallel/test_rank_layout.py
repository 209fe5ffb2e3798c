from typing import Any

import pytest
from transformers import LlamaConfig

from penstock.errors import ConfigError
from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel.rank_layout import RankLayout, check_layout, groups_of, num_plans


def layouts(**sizes: int) -> list[RankLayout]:
    parallel = ParallelConfig(**sizes)
    return [RankLayout(parallel=parallel, rank=rank) for rank in range(parallel.num_ranks)]


def test_ranks_that_split_a_sequence_or_a_matrix_share_a_plan() -> None:
    found = layouts(data=2, shard=2, context=2)
    assert [at.plan for at in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [at.context for at in found] == [0, 1] * 4
    assert [at.reports for at in found] == [True, False] * 4
    assert num_plans(ParallelConfig(data=2, shard=2, context=2)) == 4
    assert [at.plan for at in layouts(tensor=2, shard=2)] == [0, 0, 1, 1]


def test_ranks_of_a_context_split_the_weights_too() -> None:
    found = layouts(data=2, context=2, tensor=2)
    assert found[0].mesh_sizes == {"data": 2, "shard": 2, "tensor": 2}
    assert [tuple(at.mesh_coordinate.values()) for at in found[:4]] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
    ]
    assert not layouts(data=4)[0].is_sharded
    assert layouts(shard=2)[0].is_sharded


def test_groups_agree_in_what_they_are_named_by() -> None:
    parallel = ParallelConfig(shard=2, tensor=2)
    assert groups_of(parallel, "tensor") == [[0, 2], [1, 3]]
    assert groups_of(parallel, "plan") == [[0, 1], [2, 3]]
    assert groups_of(parallel) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"tensor": 3},
            "trainer.parallel.tensor must divide the model's 4 attention heads, got 3; use 1, 2 or 4",
        ),
        (
            {"context": 8},
            "trainer.parallel.context must divide the model's 4 attention heads, got 8; use 1, 2 or 4",
        ),
        (
            {"tensor": 4},
            "trainer.parallel.tensor must divide the model's 2 key and value heads, got 4; use 1 or 2",
        ),
        (
            {"tensor": 2, "context": 4},
            "trainer.parallel.context must divide the 2 attention heads that tensor=2 leaves each rank, got 4; use 1 or 2",
        ),
    ],
)
def test_what_does_not_divide_is_refused(sizes: dict[str, Any], sentence: str) -> None:
    model = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError) as refusal:
        check_layout(ParallelConfig(**sizes), model)
    assert str(refusal.value) == sentence
    check_layout(ParallelConfig(data=3, shard=5, context=2), model)
    check_layout(ParallelConfig(tensor=2, context=2), model)
