import msgspec

from penstock.observe.events import CheckpointEvent
from penstock.observe.run_state import RunState
from penstock.observe.status import AnswerStatus, ExpertStatus, FlowStatus, ProcessStatus, SampleStatus
from tests.observe.examples import (
    ONE_OF_EACH,
    SAMPLE,
    counters,
    drop,
    phase,
    run_event,
    step,
    update,
)


def state_of(*events) -> RunState:
    state = RunState()
    for event in events:
        state.on(event)
    return state


def test_a_step_makes_a_row_by_the_names_of_metrics_jsonl() -> None:
    state = state_of(
        run_event(100.0), drop("stale"), drop("stale", group=8), drop("empty"), update(1, 0.5), step(1, 104.0)
    )
    assert state.row == {
        "time_s": 4.0,
        "reward": 0.5,
        "loss": 2.0,
        "staleness_mean": 1.5,
        "staleness_max": 1.0,
        "forward_s": 0.25,
        "prepare_s": 0.125,
        "sync_stall_s": 0.5,
        "sync_transfer_s": 0.375,
        "sync_fingerprint_s": 0.0625,
        "sync_fresh_s": 2.0,
        "sync_bytes": 1024.0,
        "max_staleness": 4.0,
        "waited_s": 0.5,
        "step_s": 1.0,
        "samples": 4.0,
        "tokens_per_s": 0.0,
        "dropped_empty": 1.0,
        "dropped_stale": 2.0,
    }


def test_a_row_has_the_longest_stall_since_the_last_and_none_from_before_training() -> None:
    state, stalls = state_of(run_event(), update(0, 9.0)), []
    for number, updates in ((1, ()), (2, (0.5, 0.25)), (3, ())):
        for stall_s in updates:
            state.on(update(number, stall_s))
        state.on(step(number, 104.0 + number))
        stalls.append(state.row.get("sync_stall_s"))
    assert stalls == [None, 0.5, None]
    assert state.stalls == [0.5, 0.25]


def test_a_checkpoint_is_in_the_row_of_the_step_that_it_became_durable_in() -> None:
    durable = CheckpointEvent(process="controller", time=104.0, step=1, write_s=2.5, num_bytes=64)
    state, found = state_of(run_event()), []
    for number, events in ((1, ()), (2, (durable,)), (3, ())):
        for event in (*events, step(number, 104.0 + number)):
            state.on(event)
        found.append({name: value for name, value in state.row.items() if name.startswith("checkpoint")})
    assert found == [{}, {"checkpoint_write_s": 2.5, "checkpoint_bytes": 64.0}, {}]


def test_checkpoints_that_could_not_be_written_are_counted_until_one_is() -> None:
    state = state_of(run_event())
    for number in (2, 4):
        failed = CheckpointEvent(process="controller", time=104.0, step=number, failure="no room")
        state.on(failed)
    assert state.status().failed_checkpoints == (2, 4, "no room")
    state.on(step(5, 105.0))
    assert "checkpoint_bytes" not in state.row
    state.on(CheckpointEvent(process="controller", time=106.0, step=6, write_s=1.0, num_bytes=8))
    assert state.status().failed_checkpoints is None
    assert state.failed_checkpoints == (2, 4, "no room")  # of the whole run, for its summary


def test_what_interrupts_cost_and_what_was_skipped_is_there_once_it_happens() -> None:
    state = state_of(run_event(), step(1, 101.0))
    for number in (2, 3):
        state.on(
            msgspec.structs.replace(update(number, 0.5), num_skipped=1, discarded_tokens=7, drain_s=0.25)
        )
    state.on(step(2, 102.0))
    names = ("sync_skipped", "sync_discarded_tokens", "sync_drain_s", "sync_recomputed_tokens", "sync_bytes")
    assert [state.row.get(name) for name in names] == [2.0, 14.0, 0.25, None, 2048.0]


def test_busy_is_work_over_time_for_trainer_and_engine_alike() -> None:
    state = state_of(
        run_event(100.0),
        counters("engine0", 109.0, busy_s=50.0, tokens=900.0),
        counters("engine0", 110.0, busy_s=50.0, tokens=1000.0),
        phase("training", 110.0),
        step(1, 112.0, forward=0.5),
        counters("engine0", 112.0, busy_s=51.5, tokens=1400.0),
        step(2, 114.0, forward=0.5),
        counters("engine0", 114.0, busy_s=53.0, tokens=1800.0),
        phase("evaluating", 114.0),
        counters("engine0", 119.0, busy_s=58.0, tokens=9999.0),
    )
    (engine,) = state.engines
    assert [one.parts["work"] for one in state.time_sheet.processes()] == [1.0, 3.0]
    assert state.time_sheet.training_s == 4.0
    assert engine.tokens_training == 800.0
    assert state.status().processes[0] == ProcessStatus(name="trainer", busy=0.25, doing="")


def test_an_engine_that_was_restarted_counts_on() -> None:
    state = state_of(
        counters("engine0", 1.0, busy_s=4.0, tokens=100.0),
        counters("engine0", 2.0, busy_s=0.5, tokens=10.0),
        counters("engine0", 3.0, busy_s=1.0, tokens=20.0),
    )
    (engine,) = state.engines
    assert (engine.busy.total, engine.tokens.total) == (5.0, 120.0)


def test_the_status_is_that_of_the_last_event() -> None:
    status = state_of(*ONE_OF_EACH).status()
    assert (status.name, status.phase, status.step, status.steps) == ("demo", "training", 1, 9)
    assert (status.elapsed_s, status.reward, status.heldout) == (5.0, 0.5, ((1, 0.75),))
    assert (status.drops, status.samples, status.staleness_mean) == ({"stale": 1}, 4, 1.5)
    assert status.processes[1] == ProcessStatus(name="engine0", busy=0.0, doing="3 running, 0 waiting")


def test_the_status_has_what_a_users_loss_reports() -> None:
    event = msgspec.structs.replace(step(1, 102.0), own_metrics=("loss",))
    assert state_of(*ONE_OF_EACH, event).status().own_metrics == {"loss": 2.0}
    assert state_of(*ONE_OF_EACH).status().own_metrics == {}


def test_groups_and_steps_are_progress_and_polls_are_not() -> None:
    state = state_of(run_event(), phase("training", 101.0), counters("engine0", 150.0, tokens=1.0))
    assert state.last_progress == 101.0
    state.on(step(1, 160.0))
    assert state.last_progress == 160.0


def test_the_time_left_follows_the_pace_of_the_last_steps() -> None:
    state = state_of(run_event(100.0))
    assert state.left_s is None
    state.on(phase("training", 110.0))
    assert state.left_s is None
    state.on(step(1, 114.0))
    assert state.left_s == 8 * 4.0  # 9 are planned
    state.on(step(2, 116.0))
    assert state.left_s == 7 * 3.0
    state.on(counters("engine0", 117.0, tokens=1.0))
    assert state.status().left_s == 7 * 3.0 - 1.0
    state.on(phase("evaluating", 118.0))
    assert state.left_s is None


def test_the_pace_forgets_old_steps() -> None:
    state = state_of(run_event(100.0), phase("training", 100.0), step(1, 1000.0))
    for number in range(40):
        state.on(step(2, 1001.0 + number))
    assert state.left_s == 7 * 1.0


def test_the_status_has_flow_answers_and_the_newest_sample() -> None:
    state = state_of(run_event())
    assert (state.status().flow, state.status().answers, state.status().last_sample) == (None, None, None)
    answers = {"answer_tokens_mean": 4.0, "answer_tokens_max": 9.0, "truncated_fraction": 0.5}
    first = step(1, 104.0, reward=0.125)
    for event in (
        counters("controller", 102.0, outstanding=9.0, generating=5.0, scoring=1.0, ready=3.0, limit=16.0),
        SAMPLE,
        msgspec.structs.replace(SAMPLE, failure="timeout", reward=None, answer="late"),
        msgspec.structs.replace(first, metrics={**first.metrics, **answers}),
        step(2, 105.0, reward=0.5),
    ):
        state.on(event)
    status = state.status()
    assert status.flow == FlowStatus(generating=5, scoring=1, ready=3, limit=16)
    assert status.last_sample == SampleStatus(
        reward=1.0, prompt=SAMPLE.prompt, text="84", oldest_version=4, newest_version=5
    )
    assert (status.first_reward, status.staleness_bound, status.answers) == (0.125, 4, None)
    state.on(msgspec.structs.replace(first, metrics={**first.metrics, **answers}))
    assert state.status().answers == AnswerStatus(tokens_mean=4.0, tokens_max=9.0, truncated=0.5)
    assert state.status().experts is None
    experts = {
        "routing_replayed": 1.0,
        "routing_flipped": 0.25,
        "routing_gap": 0.5,
        "routing_gap_without": 0.75,
    }
    state.on(msgspec.structs.replace(first, metrics={**first.metrics, **experts}))
    assert state.status().experts == ExpertStatus(replayed=1.0, flipped=0.25, gap=0.5, gap_without=0.75)
    state.on(msgspec.structs.replace(first, metrics={**first.metrics, "routing_replayed": 0.0}))
    assert state.status().experts == ExpertStatus(replayed=0.0, flipped=None, gap=None, gap_without=None)


def test_ages_of_the_last_step_are_in_order() -> None:
    shares = {"tokens_age_32_up": 0.125, "tokens_age_2_3": 0.5, "tokens_age_0": 0.25, "tokens_age_1": 0.125}
    event = step(1, 104.0)
    state = state_of(run_event(), msgspec.structs.replace(event, metrics=event.metrics | shares))
    ages = [(age.first, age.last, age.share) for age in state.status().ages]
    assert ages == [(0, 0, 0.25), (1, 1, 0.125), (2, 3, 0.5), (32, None, 0.125)]


def test_who_limits_the_run_is_said_while_it_trains() -> None:
    engine = counters("engine0", 102.0, running=2.0, waiting=0.0, busy_s=0.0)
    idle = (counters("engine0", 100.5, running=0.0, waiting=0.0, busy_s=0.0),) * 9
    steps = [step(number, 104.0) for number in range(1, 5)]
    events = (run_event(), *idle, phase("training", 101.0), engine, *steps)
    bottleneck = state_of(*events).status().bottleneck
    assert bottleneck is not None
    assert (bottleneck.who, bottleneck.why) == ("engines", "trainer waits for groups 33% of the time")
    assert state_of(*events[:-1]).status().bottleneck is None
    assert state_of(*events, phase("saving", 105.0)).status().bottleneck is None
