import pytest

from penstock.observe.status import LOOKS, STEPS, Bottleneck, BottleneckStatus

WAITING = (1.0, 3.0)
"""Seconds that the trainer waited for a step, and that the step took: a quarter of the time."""


def limit(
    *,
    step: tuple[float, float] = WAITING,
    work: float = 1,
    generating: float = 0,
    scoring: float = 0,
    engines: float = 0.6,
    bound: int = 4,
) -> BottleneckStatus:
    bottleneck = Bottleneck()
    for _ in range(STEPS // 2):
        bottleneck.on_step(*step)
    bottleneck.on_counters({"running": 0.0, "waiting": work})
    bottleneck.on_counters({"generating": generating, "scoring": scoring})
    found = bottleneck.status(engines_work=engines, max_staleness=bound)
    assert found is not None
    return found


def test_the_trainer_is_the_limit_when_it_does_not_wait() -> None:
    status = limit(step=(0.1, 3.9))
    assert (status.who, status.why) == ("trainer", "it hardly waits, engines work 60% of the time")
    assert limit(step=(0.1, 3.9), engines=0.95).who == "none"


def test_engines_with_work_are_what_a_waiting_trainer_waits_for() -> None:
    status = limit(generating=8, scoring=99)
    assert (status.who, status.why) == ("engines", "trainer waits for groups 25% of the time")


@pytest.mark.parametrize(
    ("generating", "scoring", "bound", "who"),
    [
        (3, 8, 4, "rewards"),
        (3, 8, 0, "rewards"),
        (8, 3, 4, "episodes"),
        (8, 3, 0, "staleness bound 0"),
        (0, 0, 4, "weight sync"),
    ],
)
def test_engines_without_work_wait_for_somebody_too(
    generating: float, scoring: float, bound: int, who: str
) -> None:
    status = limit(work=0, generating=generating, scoring=scoring, bound=bound)
    assert (status.who, status.why) == (who, "trainer waits 25% of the time, engines work 60%")
    assert len(f"{status.who}: {status.why}") <= 80 - 11


def test_a_step_or_two_say_nothing_unless_they_are_long() -> None:
    bottleneck = Bottleneck()
    for _ in range(STEPS // 2 - 1):
        bottleneck.on_step(*WAITING)
    assert bottleneck.status(engines_work=0.5, max_staleness=4) is None
    for _ in range(LOOKS):
        bottleneck.on_counters({"running": 1.0, "waiting": 0.0})
    assert bottleneck.status(engines_work=0.5, max_staleness=4) is not None


def test_only_the_last_seconds_count() -> None:
    bottleneck = Bottleneck()
    assert bottleneck.status(engines_work=0.0, max_staleness=4) is None
    for work, step in ((0.0, (9.0, 1.0)), (1.0, WAITING)):
        for _ in range(STEPS):
            bottleneck.on_step(*step)
        for _ in range(LOOKS):
            bottleneck.on_counters({"running": work, "waiting": 0.0})
    assert bottleneck.status(engines_work=1.0, max_staleness=4) == BottleneckStatus(
        who="engines", why="trainer waits for groups 25% of the time"
    )
