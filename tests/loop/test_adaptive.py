import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loop.adaptive import AdaptiveBound, AdaptiveRules, ClosedLoop, starting_bound
from penstock.loop.admission import StalenessGate
from penstock.loop.config import StalenessConfig
from penstock.loop.rollout_buffer import RolloutBuffer

RULES = AdaptiveRules(min_staleness=1, max_staleness=8, window=2)


def run(state, num, *, ess, idle):
    bounds = []
    for _ in range(num):
        state = state.observe(ess=ess(state.bound), idle=idle(state.bound))
        bounds.append(state.bound)
    return state, bounds


def test_low_ess_tightens_by_one_after_the_dead_time_and_a_window():
    state = AdaptiveBound.start(RULES, 4)
    state, bounds = run(state, 7, ess=lambda b: 0.3, idle=lambda b: 0.5)
    assert bounds == [4] * 6 + [3]


def test_an_idle_trainer_with_healthy_ess_relaxes():
    _, bounds = run(AdaptiveBound.start(RULES, 1), 4, ess=lambda b: 0.9, idle=lambda b: 0.5)
    assert bounds == [1, 1, 1, 2]


def test_between_the_thresholds_nothing_moves():
    """ESS over the floor but within the margin, however idle the trainer; or healthy and busy."""
    assert run(AdaptiveBound.start(RULES, 3), 60, ess=lambda b: 0.55, idle=lambda b: 0.9)[1] == [3] * 60
    assert run(AdaptiveBound.start(RULES, 3), 60, ess=lambda b: 0.99, idle=lambda b: 0.1)[1] == [3] * 60


def test_a_bound_that_failed_is_not_tried_again_until_the_ess_below_it_rises():
    """ESS jumps from 0.9 at 3 to 0.3 at 4: hysteresis alone would swing between them for ever."""
    cliff = lambda b: 0.9 if b <= 3 else 0.3  # noqa: E731
    state, bounds = run(AdaptiveBound.start(RULES, 5), 200, ess=cliff, idle=lambda b: 0.5)
    assert bounds[-1] == 3
    assert [a for a, b in itertools.pairwise(bounds) if a != b] == [5, 4]
    assert state.ceiling.bound == 4
    _, later = run(state, 60, ess=lambda b: 1.0 if b <= 5 else 0.3, idle=lambda b: 0.5)
    assert later[-1] == 3
    state, lifted = run(state, 200, ess=lambda b: 1.01 if b <= 5 else 0.3, idle=lambda b: 0.5)
    assert lifted[-1] == 5
    assert max(lifted) == 6


def test_bounds_hold_at_both_ends():
    assert set(run(AdaptiveBound.start(RULES, 99), 100, ess=lambda b: 0.9, idle=lambda b: 1.0)[1]) == {8}
    _, bounds = run(AdaptiveBound.start(RULES, 4), 100, ess=lambda b: 0.0, idle=lambda b: 1.0)
    assert bounds[-1] == min(bounds) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_staleness": 9, "max_staleness": 8},
        {"ess_floor": 0.0},
        {"window": 0},
        {"idle_limit": 1.0},
        {"ess_margin": -1},
    ],
)
def test_rules_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        AdaptiveRules(**wrong)


PHASES = st.lists(
    st.tuples(
        st.floats(0.01, 0.6),  # how fast the ESS falls with staleness: the trainer's own speed of change
        st.floats(0.1, 10.0),  # how many steps of generation fit into one trainer step: relative speed
    ),
    min_size=1,
    max_size=4,
)
PHASE_STEPS = 500


@settings(max_examples=150, deadline=None)
@given(
    phases=PHASES,
    first=st.integers(0, 20),
    window=st.integers(1, 6),
    low=st.integers(0, 3),
    high=st.integers(3, 12),
    noise=st.lists(st.floats(-0.045, 0.045), min_size=7, max_size=7),
)
def test_under_speed_changes_it_settles_never_oscillates_and_keeps_its_bounds(
    phases, first, window, low, high, noise
):
    """ESS falls and idling falls as the bound grows; both speeds change between phases, with noise of
    just under half the margin. In each phase the bound turns round at most once and ends up still."""
    rules = AdaptiveRules(min_staleness=low, max_staleness=high, window=window)
    state = AdaptiveBound.start(rules, first)
    step = 0
    for decay, speed in phases:
        bounds = [state.bound]
        for _ in range(PHASE_STEPS):
            step += 1
            ess = max(0.01, min(1.0, (1 - decay) ** state.bound + noise[step % 7]))
            idle = max(0.0, 1 - speed * (state.bound + 1) / 6)
            state = state.observe(ess=ess, idle=idle)
            assert low <= state.bound <= high
            bounds.append(state.bound)
        moves = [b - a for a, b in itertools.pairwise(bounds) if a != b]
        assert all(abs(move) == 1 for move in moves)
        turns = sum(a != b for a, b in itertools.pairwise(moves))
        assert turns <= 1
        assert len(set(bounds[PHASE_STEPS // 2 :])) == 1


def test_the_starting_bound_is_within_what_the_loop_may_set() -> None:
    assert starting_bound(StalenessConfig(max_staleness=3)) == 3
    assert starting_bound(StalenessConfig(max_staleness=9, adaptive=True, adaptive_max=6)) == 6


def test_the_loop_begins_with_the_bound_in_force() -> None:
    """Which is, in a resumed run, the one that the loop had found."""
    gate = StalenessGate(groups_per_step=1, max_staleness=5, late="mask")
    config = StalenessConfig(max_staleness=1, adaptive=True, adaptive_max=8)

    assert ClosedLoop.of(config, RolloutBuffer(gate)).observe(ess=1.0, idle=0.0) == 5
    assert gate.max_staleness == 5
