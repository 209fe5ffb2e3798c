from penstock.loop.admission import StepGroups
from penstock.loop.step_planner import TrainedStep
from penstock.records import StepResult


def trained(*results: StepResult) -> TrainedStep:
    return TrainedStep(
        number=1,
        taken=StepGroups(step=0, groups=()),
        results=results,
        waited_s=0.0,
        took_s=0.0,
        time_s=0.0,
    )


def test_seconds_are_means_over_ranks_also_of_those_without_rows() -> None:
    step = trained(
        StepResult(step=1, metrics={}, seconds={"prepare": 1.0}),
        StepResult(step=1, metrics={}, seconds={"prepare": 2.0, "forward": 4.0}),
    )
    assert step.seconds() == {"prepare": 1.5, "forward": 2.0}


def test_own_metrics_are_those_of_any_rank() -> None:
    step = trained(
        StepResult(step=1, metrics={}, seconds={}),
        StepResult(step=1, metrics={}, seconds={}, own_metrics=("my_weight",)),
        StepResult(step=1, metrics={}, seconds={}, own_metrics=("my_weight", "my_gate")),
    )
    assert step.own_metrics() == ("my_weight", "my_gate")
