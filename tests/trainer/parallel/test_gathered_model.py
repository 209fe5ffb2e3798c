"""Whole tensors on the first rank, and nobody waits for a rank that has no memory for its part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel import gathered_model
from penstock.trainer.parallel.gathered_model import gather_model
from penstock.trainer.parallel.local_shards import own_shards
from penstock.trainer.parallel.process_ranks import leave_ranks
from tests.trainer.parallel.layout_gradients import join
from tests.trainer.parallel.rank_processes import on_ranks

pytestmark = pytest.mark.processes

WHOLE = {"rows": torch.arange(10.0).view(5, 2), "scalar": torch.tensor(3.0), "one": torch.ones(1)}


class FullHost:
    """Stands for torch on a host that has no memory left."""

    uint8 = torch.uint8

    def empty(self, *args: Any, **options: Any) -> torch.Tensor:
        raise MemoryError("no memory left")


def gather(rank: int, folder: Path) -> tuple[dict[str, Any], str]:
    ranks = join(rank, folder, ParallelConfig(data=2))
    own = own_shards(WHOLE, ranks.layout)
    found = gather_model(own, list(WHOLE), ranks.checkpoints)
    if rank == 0:
        gathered_model.torch = FullHost()  # type: ignore[assignment]
    try:
        gather_model(own, list(WHOLE), ranks.checkpoints)
        said = ""
    except Exception as error:
        said = str(error)
    ranks.world.gather(torch.zeros(1).numpy())  # both are still in step
    leave_ranks()
    return {name: tensor.tolist() for name, tensor in found.items()}, said


def test_the_first_rank_has_all_and_a_full_host_is_told_to_all() -> None:
    (first, no_memory), (second, other) = on_ranks(2, gather)
    assert first == {name: tensor.tolist() for name, tensor in WHOLE.items()}
    assert second == {}
    assert (no_memory, other) == ("no memory left", "another rank could not write its part")
