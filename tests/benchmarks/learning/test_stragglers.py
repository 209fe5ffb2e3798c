import dataclasses

import pytest

from benchmarks.learning.arms import Arm, Curve, Setup
from benchmarks.learning.stragglers import STRAGGLE_TICKS, carries, run_stragglers
from penstock.loop.admission import Late
from penstock.records import Task

BOUND = 4


def run(late: Late, setup: Setup) -> Curve:
    setup = dataclasses.replace(setup, steps=16, eval_every=8)
    return run_stragglers(Arm(name=late, lag=BOUND, late=late), 0, setup)


@pytest.mark.parametrize("late", ["mask", "wait", "drop"])
def test_no_token_is_past_the_bound(late: Late, setup: Setup) -> None:
    curve = run(late, setup)
    assert 0 < curve.staleness_max <= BOUND


def test_correct_trains_on_what_is_late(setup: Setup) -> None:
    curve = run("correct", setup)
    assert BOUND < curve.staleness_max <= STRAGGLE_TICKS + 2
    assert not curve.drops


def test_only_drop_discards_and_only_wait_waits(setup: Setup) -> None:
    drop, wait, mask = (run(late, setup) for late in ("drop", "wait", "mask"))
    assert drop.drops["stale"] > 0
    assert not wait.drops
    assert wait.ticks[-1] > mask.ticks[-1]


def test_carries() -> None:
    assert carries(Task(id="a", prompt="214+387="))
    assert not carries(Task(id="b", prompt="214+385="))
