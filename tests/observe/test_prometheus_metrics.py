import msgspec

from penstock.observe.prometheus_metrics import prometheus_text
from tests.observe.examples import ONE_OF_EACH, counters, drop, phase, run_event, state_of, step


def text(*events) -> str:
    return prometheus_text(state_of(*events))


def test_what_is_known_of_a_run() -> None:
    lines = text(
        *ONE_OF_EACH,
        phase("training", 105.0),
        step(2, 106.0, reward=0.75),
        drop("stale"),
        counters("controller", 106.0, generating=3.0, scoring=1.0, ready=2.0, limit=9.0),
    ).splitlines()
    for line in (
        "# TYPE penstock_step gauge",
        'penstock_step{run="demo"} 2.0',
        'penstock_reward{run="demo"} 0.625',
        'penstock_heldout_reward{run="demo"} 0.75',
        'penstock_dropped_groups_total{run="demo",reason="stale"} 2.0',
        'penstock_groups{run="demo",stage="ready"} 2.0',
        'penstock_metric{run="demo",name="loss"} 2.0',
        'penstock_samples_total{run="demo"} 8.0',
    ):
        assert line in lines, line


def test_names_cant_break_the_format() -> None:
    named = msgspec.structs.replace(run_event(), name='a"b\\c\nd')
    assert 'penstock_step{run="a\\"b\\\\c\\nd"} 0.0' in text(named).splitlines()


def test_what_is_not_known_is_left_out() -> None:
    told = text(run_event(), step(1, 101.0, reward=float("nan")))
    assert "penstock_heldout_reward" not in told
    assert "nan" not in told.lower()
