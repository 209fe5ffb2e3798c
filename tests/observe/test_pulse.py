from penstock.observe.pulse import Pulse, PulseReport
from tests.observe.examples import HandClock


def test_the_phase_that_is_nearest_to_its_limit_is_told() -> None:
    clock = HandClock(10.0)
    pulse = Pulse(clock)
    assert pulse.report() == PulseReport()
    with pulse.phase("step 3", 5.0):
        clock.now = 12.0
        with pulse.phase("checkpoint", 100.0):
            clock.now = 13.0
            assert pulse.report() == PulseReport(phase="step 3", quiet_s=3.0, limit_s=5.0)
        assert pulse.report().left_s == 2.0
    assert pulse.report().phase == "waiting for work"


def test_a_phase_that_raises_is_over() -> None:
    pulse = Pulse(HandClock())
    try:
        with pulse.phase("step 3", 5.0):
            raise RuntimeError
    except RuntimeError:
        pass
    assert pulse.report() == PulseReport()


def test_a_loop_that_has_work_and_does_not_get_on_is_quiet() -> None:
    clock, seen = HandClock(0.0), list[float]()
    pulse, progress = Pulse(clock), list[float | None]([None, 5, 5, 6, 6, None, 6])
    pulse.watch("generating", lambda: progress[0], 60.0)
    while progress:
        report = pulse.report()
        assert report.limit_s == (0.0 if progress[0] is None else 60.0)
        seen.append(report.quiet_s)
        clock.now += 10.0
        progress.pop(0)
    assert seen == [0.0, 0.0, 10.0, 0.0, 10.0, 0.0, 0.0]


def test_a_loop_may_take_its_time_and_its_process_answers_all_the_same() -> None:
    clock = HandClock(0.0)
    pulse = Pulse(clock)
    pulse.watch("generating", lambda: 1.0, 60.0)
    assert pulse.report().longest_silence_s == 0.0
    with pulse.phase("compiling", 1800.0):
        report = pulse.report()
        assert (report.phase, report.limit_s, report.longest_silence_s) == ("generating", 60.0, 1800.0)
    with pulse.phase("step 3", 5.0):
        report = pulse.report()
        assert (report.phase, report.limit_s, report.longest_silence_s) == ("step 3", 5.0, 5.0)
