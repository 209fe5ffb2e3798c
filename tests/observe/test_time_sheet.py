from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.events import StepEvent
from penstock.observe.time_sheet import TimeSheet, cost_of, fitted
from tests.observe.examples import counters, phase, run_event, update


def step(time: float, *, waits: dict[str, float], took_s: float = 1.0) -> StepEvent:
    return StepEvent(
        process="controller",
        time=time,
        step=1,
        reward=0.0,
        num_samples=1,
        metrics={},
        seconds={"forward": 0.25, "backward": 0.25, "snapshot": 0.125, "prepare": 0.125},
        waited_s=sum(waits.values()),
        took_s=took_s,
        max_staleness=1,
        waits=waits,
    )


def sheet(*events) -> dict[str, dict[str, float]]:
    found = TimeSheet()
    for event in events:
        found.on(event)
    return {one.process: one.parts for one in found.processes()}


def engine(time: float, busy_s: float, running: float = 1.0):
    return counters("engine0", time, busy_s=busy_s, running=running, waiting=0.0, tokens=1.0)


def test_the_trainers_time_by_part() -> None:
    found = sheet(
        phase("training", 10.0),
        step(12.0, waits={"generation": 0.5, "scoring": 0.25}),
        step(14.0, waits={"generation": 1.0}),
        phase("evaluating", 15.0),
        phase("done", 20.0),
    )["trainer"]
    assert found == {
        "work": 1.0,
        "sync": 0.25,
        "rest of the step": 0.75,
        "wait: generation": 1.5,
        "wait: scoring": 0.25,
        "between steps": 1.25,
    }


def test_an_engines_time_by_part() -> None:
    found = sheet(
        counters("controller", 10.0, blocked_bound_s=1.0),
        phase("training", 10.0),
        engine(10.0, 5.0),
        engine(12.0, 6.5),
        update(2, 0.25, time=12.0),
        counters("controller", 14.0, blocked_bound_s=4.0),
        engine(14.0, 6.5, running=0.0),
        phase("evaluating", 16.0),
    )["engine0"]
    assert found == {
        "work": 1.5,
        "sync": 0.25,
        "idle: the bound is reached": 1.5,
        "idle: tools and rewards run": 0.5,
        "between passes": 2.25,
    }


def test_a_heartbeat_says_nothing_of_admission() -> None:
    events = [
        counters("controller", 10.0, blocked_bound_s=1.0),
        phase("training", 10.0),
        engine(10.0, 5.0),
        counters("controller", 12.0, blocked_bound_s=2.0),
        engine(14.0, 5.0, running=0.0),
        phase("evaluating", 14.0),
    ]
    heartbeats = [counters("controller", 11.0), counters("controller", 13.0)]
    assert sheet(*sorted([*events, *heartbeats], key=lambda event: event.time)) == sheet(*events)


def test_a_process_that_was_started_again_counts_from_zero() -> None:
    found = sheet(
        phase("training", 10.0), engine(10.0, 5.0), engine(12.0, 0.5), engine(13.0, 1.0), phase("done", 14.0)
    )
    assert found["engine0"]["work"] == 1.0


def test_what_happens_between_two_trainings_does_not_count() -> None:
    found = sheet(
        phase("training", 10.0),
        engine(10.0, 0.0),
        engine(12.0, 2.0),
        phase("evaluating", 12.0),
        engine(14.0, 4.0),
        phase("training", 15.0),
        engine(15.0, 5.0),
        engine(16.0, 5.5),
        phase("done", 16.0),
    )
    assert found["engine0"] == {"work": 2.5, "sync": 0.0, "between passes": 0.5}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "engine", "idle", "controller", "update"]),
            st.floats(0, 5),
            st.floats(0, 9),
        ),
        max_size=30,
    )
)
def test_parts_add_up_whatever_was_measured(moves) -> None:
    found, time, busy = TimeSheet(), 0.0, 0.0
    found.on(phase("training", 0.0))
    for kind, length, amount in moves:
        time += length
        busy += amount
        found.on(
            {
                "step": step(time, waits={"generation": amount}, took_s=length),
                "engine": engine(time, busy),
                "idle": engine(time, busy, running=0.0),
                "controller": counters("controller", time, blocked_stock_s=busy),
                "update": update(1, amount, time=time),
            }[kind]
        )
    found.on(phase("done", time + 1))
    for one in found.processes():
        assert abs(sum(one.parts.values()) - one.total_s) < 1e-6
        assert all(seconds >= 0 for seconds in one.parts.values())
        assert abs(sum(one.shares.values()) - 1) < 1e-6


def test_a_session_that_was_killed_trained_until_its_last_event() -> None:
    found = TimeSheet()
    for event in (
        phase("training", 10.0),
        step(12.0, waits={"generation": 0.5}),
        run_event(5000.0),
        phase("training", 5010.0),
        step(5013.0, waits={"generation": 0.5}),
        phase("done", 5013.0),
    ):
        found.on(event)
    assert found.training_s == 5.0


def test_a_process_worked_waited_and_did_other_things() -> None:
    found = TimeSheet()
    for event in (
        phase("training", 10.0),
        engine(10.0, 0.0),
        step(12.0, waits={"generation": 0.5, "scoring": 0.25}),
        engine(12.0, 0.5, running=0.0),
        phase("done", 12.0),
    ):
        found.on(event)
    assert found.sums() == (
        {"worked": 0.25, "waited": 0.375, "other": 0.375},
        {"worked": 0.25, "waited": 0.75, "other": 0.0},
    )
    assert TimeSheet().sums() == (dict.fromkeys(("worked", "waited", "other"), 0.0),) * 2


def test_an_engines_last_reading_before_training_is_where_its_work_begins() -> None:
    found = sheet(engine(9.0, 4.0), phase("training", 10.0), engine(12.0, 7.0), phase("done", 14.0))
    assert found["engine0"]["work"] == 2.0  # two thirds of the three seconds between the readings


def test_nothing_is_told_before_training() -> None:
    assert sheet(engine(1.0, 1.0)) == {}
    assert fitted({"a": 3.0, "b": 1.0}, 2.0) == {"a": 1.5, "b": 0.5}


def test_hours_of_all_gpus_and_their_price() -> None:
    cost = cost_of(num_gpus=4, seconds=1800.0, tokens=10_000.0, tokens_training=8000.0, gpu_hour_price=2.5)
    assert (cost.gpu_hours, cost.tokens_per_gpu_hour, cost.price) == (2.0, 5000.0, 5.0)


def test_a_cpu_has_neither() -> None:
    cost = cost_of(num_gpus=0, seconds=1800.0, tokens=10_000.0, tokens_training=8000.0, gpu_hour_price=None)
    assert (cost.gpu_hours, cost.tokens_per_gpu_hour, cost.price) == (0.0, None, None)
