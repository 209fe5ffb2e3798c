from penstock.cli.training_commands import lines_of
from penstock.planner.simulated_run import Outcome

OUTCOME = Outcome(
    engines=1000,
    ranks=64,
    steps=4,
    groups=4000,
    hours=0.5,
    trainer_busy=0.1,
    engine_busy=0.2,
    tokens_per_s=1e6,
    staleness_mean=1.0,
    staleness_max=4,
    transport="http",
    limits={"weight sync": 0.72, "trainer": 0.18, "engines": 0.1, "scoring": 0.0},
    node_deaths=0,
    dropped={},
    controller_us_per_group=3000.0,
)


def test_a_simulation_says_which_stage_limits_it() -> None:
    first, busy, limit, *_ = lines_of(OUTCOME)
    assert first.endswith("4 steps of 1,000 groups in 0.50 h of virtual time, weights by http")
    assert busy == "busy: trainer 10%, engines 20%; 1,000,000 tokens/s"
    assert limit == (
        "limited by weight sync 72% of the time (groups wait for engines with new weights); trainer 18%; "
        "engines 10%"
    )
