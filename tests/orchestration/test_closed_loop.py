from penstock.buffer.admission import StalenessGate, StepGroups
from penstock.buffer.config import StalenessConfig
from penstock.buffer.rollout_buffer import RolloutBuffer
from penstock.orchestration.closed_loop import ClosedLoop, starting_bound
from penstock.orchestration.step_planner import TrainedStep

STEP = TrainedStep(
    number=1, taken=StepGroups(step=0, groups=()), results=(), waited_s=0.0, took_s=1.0, time_s=1.0
)


def test_the_starting_bound_is_within_what_the_loop_may_set() -> None:
    assert starting_bound(StalenessConfig(max_staleness=3)) == 3
    assert starting_bound(StalenessConfig(max_staleness=9, adaptive=True, adaptive_max=6)) == 6


def test_the_loop_begins_with_the_bound_in_force() -> None:
    """Which is, in a resumed run, the one that the loop had found."""
    gate = StalenessGate(groups_per_step=1, max_staleness=5, late="mask")
    config = StalenessConfig(max_staleness=1, adaptive=True, adaptive_max=8)

    assert ClosedLoop.of(config, RolloutBuffer(gate)).observe(STEP) == 5
    assert gate.max_staleness == 5
