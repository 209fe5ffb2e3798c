"""Schedules are played and audited, and one that breaks the promise is counted and says how to replay it."""

import io

import pytest
from rich.console import Console

from benchmarks import crash_schedules
from benchmarks.crash_schedules import Played, play, run, summed
from benchmarks.crashes.crash_world import CrashWorld
from penstock.bench.saved_report import SavedReport

pytestmark = pytest.mark.processes


def test_schedules_are_played_and_audited() -> None:
    report, shown = SavedReport(None), io.StringIO()
    run(report, Console(file=shown, width=200), schedules=7)
    assert report.data["headline"] == {"violations": 0, "schedules": 7}
    crashes = report.data["crashes"]
    assert crashes["crashes"] > 3
    assert 0 < crashes["regenerated_fraction"] < 1
    assert f"7 schedules with {crashes['crashes']} crashes: 0 violations" in shown.getvalue()


def test_what_breaks_the_promise_is_a_violation() -> None:
    def trained_twice(world: CrashWorld) -> None:
        raise AssertionError("trained twice: [3, 3]")

    played = play(1, trained_twice)
    assert played.violation == "AssertionError: trained twice: [3, 3]"
    fine = Played(seed=2, crashes=4, num_sampled=90, num_again=0, violation=None)
    known = Played(seed=1, crashes=1, num_sampled=10, num_again=5, violation=played.violation)
    result = summed([known, fine])
    assert (result["violations"], result["crashes"], result["regenerated_fraction"]) == (1, 5, 0.05)
    assert result["broken"] == [
        "seed 1: AssertionError: trained twice: [3, 3]; replay it: pytest tests/durability/test_recovery.py "
        "-k any_crash --first-seed 1 --seeds 1"
    ]
    assert crash_schedules.SCHEDULES == 500
