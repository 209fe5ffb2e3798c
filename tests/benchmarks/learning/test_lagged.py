import pytest

from benchmarks.learning.arms import NONE, Arm, Setup
from benchmarks.learning.lagged import run_lagged


def test_the_imposed_lag_is_what_is_measured(setup: Setup) -> None:
    curve = run_lagged(Arm(name="lagged", lag=3), 0, setup)
    ages = [0, 1, 2, 3, 3, 3, 3, 3]
    assert curve.staleness_mean == pytest.approx(sum(ages) / len(ages))
    assert curve.staleness_max == 3
    assert curve.samples == [0, 32, 64, 96, 128]
    assert curve.ess_mean < 0.9999


def test_synchronous_logprobs_agree_with_the_trainers(setup: Setup) -> None:
    curve = run_lagged(Arm(name="synchronous"), 0, setup)
    assert curve.staleness_max == 0
    assert curve.logprob_gap_max < 1e-4
    assert curve.rewards[-1] != curve.rewards[0]


def test_on_policy_no_correction_and_the_default_are_the_same(setup: Setup) -> None:
    default, none = (
        run_lagged(Arm(name=name, algorithm=algorithm), 0, setup)
        for name, algorithm in (("default", {}), ("none", NONE))
    )
    assert none.rewards == pytest.approx(default.rewards, abs=1e-4)


def test_seeds_are_paired_and_different(setup: Setup) -> None:
    one, same, other = (run_lagged(Arm(name="a", lag=1), seed, setup).rewards for seed in (0, 0, 1))
    assert one == same
    assert one[1:] != other[1:]
