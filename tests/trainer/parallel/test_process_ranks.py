"""Ranks as processes say what threads would."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import UserError
from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel.local_shards import local_shard, own_shards
from penstock.trainer.parallel.process_ranks import check_same, leave_ranks, sample_of
from tests.trainer.builders import tiny_model
from tests.trainer.parallel.layout_gradients import join
from tests.trainer.parallel.rank_processes import on_ranks

pytestmark = pytest.mark.processes


def exchange(rank: int, folder: Path) -> dict[str, Any]:
    ranks = join(rank, folder, ParallelConfig(data=2))
    world = ranks.world
    tensors = [torch.full((3,), float(rank + 1)), torch.ones(2, 2, dtype=torch.float64) * rank]
    world.sum_tensors(tensors)
    found = {
        "lengths": [part.tolist() for part in world.gather(np.arange(rank, dtype=np.int32))],
        "shapes": [part.tolist() for part in world.gather(np.array([[rank, 2]]))],
        "flags": [part.tolist() for part in world.gather(np.array([rank == 1]))],
        "sums": [tensor.tolist() for tensor in tensors],
        "places": (ranks.data.rank, ranks.gradients.size, ranks.checkpoints.size),
    }
    check_same(world, b"abc", "settings")
    with pytest.raises(UserError, match="all ranks of a trainer must have the same settings"):
        check_same(world, b"abc"[: rank + 2], "settings")
    whole = torch.arange(10.0).view(5, 2)
    own = own_shards({"whole": whole, "scalar": torch.tensor(3.0)}, ranks.layout)
    found["own"] = {name: (part.start, part.values.tolist()) for name, part in own.items()}
    found["copies"] = local_shard(whole, ranks.layout).num_copies
    leave_ranks()
    return found


def test_ranks_exchange_arrays_and_sums() -> None:
    first, second = on_ranks(2, exchange)
    for found in (first, second):
        assert found["lengths"] == [[], [0]]
        assert found["shapes"] == [[[0, 2]], [[1, 2]]]
        assert found["flags"] == [[False], [True]]
        assert found["sums"] == [[3.0] * 3, [[1.0, 1.0]] * 2]
        assert found["copies"] == 2
    assert (first["places"], second["places"]) == ((0, 2, 2), (1, 2, 2))
    assert first["own"] == {
        "whole": ((0, 0), [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]),
        "scalar": ((), 3.0),
    }
    assert second["own"] == {"whole": ((3, 0), [[6.0, 7.0], [8.0, 9.0]])}


def test_another_shape_or_other_values_have_another_sample() -> None:
    model = tiny_model("llama")
    assert sample_of(model) == sample_of(tiny_model("llama"))
    assert sample_of(model) != sample_of(tiny_model("llama", seed=1))
    assert sample_of(model) != sample_of(tiny_model("llama", num_hidden_layers=1))
    before = sample_of(model)
    with torch.no_grad():
        model.lm_head.weight += 1e-4
    assert sample_of(model) != before
