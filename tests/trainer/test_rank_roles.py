from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel.rank_layout import RankLayout
from penstock.trainer.rank_roles import RankRoles
from penstock.trainer.ranks import ThreadRanks


def processes(layout: RankLayout) -> Any:
    names = ("data", "gradients", "world", "checkpoints")
    return SimpleNamespace(layout=layout, **{name: object() for name in names})


def layout_of(**sizes: int) -> RankLayout:
    return RankLayout(parallel=ParallelConfig(**sizes), rank=0)


def test_a_trainer_that_is_alone_hears_itself_in_every_role():
    roles = RankRoles.of(None, None)
    assert [part.tolist() for part in roles.world.gather(np.array([3, 1]))] == [[3, 1]]
    assert roles.data is roles.gradients is roles.world
    assert (roles.layout, roles.checkpoints, roles.is_split) == (None, None, False)
    roles.split("no model", "no config", "cpu")  # type: ignore[arg-type]  # nothing is split


def test_ranks_that_are_given_take_every_role():
    (first, _) = ThreadRanks.of(2)
    roles = RankRoles.of(first, None)
    assert (roles.data, roles.gradients, roles.world) == (first, first, first)


@pytest.mark.parametrize(("sizes", "is_split"), [({"data": 2}, False), ({"shard": 2}, True)])
def test_processes_have_a_group_for_each_role(sizes: dict[str, int], is_split: bool):
    group = processes(layout_of(**sizes))
    roles = RankRoles.of(None, group)
    assert (roles.data, roles.gradients, roles.world) == (group.data, group.gradients, group.world)
    assert (roles.checkpoints, roles.layout, roles.is_split) == (group.checkpoints, group.layout, is_split)
