from penstock.observe.pulse import PulseReport
from penstock.orchestration.freezing import STEP_S, Silence


def look_until(silence: Silence, start: float, end: float) -> str | None:
    """Every half second."""
    now = start
    while now <= end:
        why = silence.look(now)
        if why is not None:
            return f"{now:g}: {why}"
        now += STEP_S
    return None


def test_a_worker_that_answers_no_more_is_frozen_after_what_is_allowed() -> None:
    silence = Silence(10.0, 100.0, PulseReport())
    assert look_until(silence, 100.0, 110.0) is None
    silence.hear(110.0, PulseReport())
    assert look_until(silence, 110.5, 200.0) == (
        "120.5: it has not answered for 10 s (waiting for work), 10 s are allowed"
    )


def test_a_worker_may_be_silent_as_long_as_the_phase_that_it_declared() -> None:
    silence = Silence(10.0, 0.0, PulseReport(phase="compiling", limit_s=60.0))
    why = look_until(silence, 0.0, 200.0)
    assert why == "60.5: it has not answered for 60 s (compiling), 60 s are allowed"


def test_a_worker_whose_loop_may_take_long_is_to_answer_all_the_same() -> None:
    silence = Silence(10.0, 0.0, PulseReport(phase="generating", limit_s=60.0, silent_s=0.0))
    why = look_until(silence, 0.0, 200.0)
    assert why == "10.5: it has not answered for 10 s (generating), 10 s are allowed"


def test_a_worker_that_answers_while_its_work_stands_still_is_frozen_too() -> None:
    silence = Silence(10.0, 0.0, PulseReport())
    for second in range(40):
        silence.hear(float(second), PulseReport(phase="step 3", quiet_s=float(second), limit_s=20.0))
        why = silence.look(float(second))
        if why is not None:
            assert (second, why) == (21, "its work (step 3) has not moved for 21 s, 20 s are allowed")
            return
    raise AssertionError


def test_time_in_which_the_watcher_stood_still_is_nobodys_silence() -> None:
    silence = Silence(10.0, 0.0, PulseReport())
    assert silence.look(0.5) is None
    assert silence.look(500.0) is None
    assert look_until(silence, 500.5, 508.0) is None
    assert look_until(silence, 508.5, 520.0) is not None
