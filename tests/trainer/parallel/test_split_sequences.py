"""Sequences that are split over ranks: soft-caps, windows, and fewer key heads than ranks."""

import pytest

from tests.trainer.builders import tiny_model
from tests.trainer.parallel.layout_gradients import Case, errors_on_rank
from tests.trainer.parallel.rank_processes import on_ranks
from tests.trainer.test_algorithms import near_policy

pytestmark = pytest.mark.processes
PLAIN: list[Case] = [({"loss": "clip"}, {})]


def test_windows_and_soft_caps_see_the_whole_sequence() -> None:
    """Two key heads on four ranks: each rank has a copy of the one that its query head needs."""
    model = tiny_model("gemma2")
    groups = near_policy(model, 3, shape=(3, 2))
    for found in on_ranks(4, errors_on_rank, [{"context": 4}], model, groups, PLAIN):
        assert max(found.values()) <= 1e-5
