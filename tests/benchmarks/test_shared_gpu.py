"""Two real processes on a tiny model; shares and the headline by hand."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared_gpu import (
    Pair,
    Setting,
    compare,
    environments,
    headline,
    memory_line,
    on_cpu,
    run,
)
from benchmarks.shared_gpu_worker import Moment, rate
from penstock.bench.child import ChildDied
from penstock.processes.launchers.mps import Mps
from tests.processes.launchers.fake_mps import FakeMps

pytestmark = pytest.mark.processes


def arm(generation: float, training: float) -> dict[str, Any]:
    return {"generation_share": generation, "training_share": training, "sum": generation + training}


def test_shares_are_of_what_each_does_alone() -> None:
    alone = {"engine": {"tokens_per_s": 100.0}, "trainer": {"tokens_per_s": 40.0}}
    both = {"engine": {"tokens_per_s": 75.0}, "trainer": {"tokens_per_s": 20.0}}
    compared = compare(both, alone)
    assert (compared["generation_share"], compared["training_share"], compared["sum"]) == (0.75, 0.5, 1.25)


def test_the_headline_is_the_best_sum_that_starves_nobody() -> None:
    arms = {"a": arm(0.5, 0.5), "b": arm(0.19, 1.0), "c": arm(0.25, 0.95)}
    assert headline(arms) == {"colocated_sum": 1.2}
    assert headline({"b": arms["b"]}) == {}


def test_a_rate_is_between_two_ends_of_units() -> None:
    assert rate(Moment(10, 1, 5.0), Moment(70, 4, 6.5)) == {
        "tokens_per_s": 40.0,
        "step_ms": 500.0,
        "seconds": 1.5,
    }


def test_settings_become_environments() -> None:
    both = environments(Mps({"FOLDER": "/f"}), Setting("trainer"))
    assert both["engine"] == {
        "FOLDER": "/f",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
        "CUDA_MPS_CLIENT_PRIORITY": "0",
    }
    assert both["trainer"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
    assert both["trainer"]["CUDA_MPS_CLIENT_PRIORITY"] == "1"


@pytest.mark.full
def test_two_processes_work_alone_together_and_under_a_daemon(tmp_path: Path) -> None:
    fake = FakeMps(tmp_path)
    report = run(on_cpu(), settings=(Setting(),), settle_s=0.05, measure_s=0.2, environ=fake.environ)
    assert fake.told == ["-d", "get_server_list", "quit"]
    assert list(report["arms"]) == ["time slices", "MPS"]
    for measured in report["arms"].values():
        assert measured["sum"] == measured["generation_share"] + measured["training_share"] > 0
        assert measured["engine"]["tokens_per_s"] > 0 < measured["trainer"]["step_ms"]


def test_a_process_that_dies_is_an_error_and_the_other_is_stopped() -> None:
    with (
        Pair(on_cpu(), {"PYTHONHOME": "/nowhere"}) as pair,
        pytest.raises(ChildDied, match="ended with code 1"),
    ):
        pair.ask({"engine": {}, "trainer": {}})
    assert pair.processes == {}


@pytest.mark.full
def test_an_arm_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of a daemon that is not what it seems: here, one that takes their Python away."""
    monkeypatch.setattr(Mps, "environment", lambda self, **limits: {"PYTHONHOME": "/nowhere"})
    environ = FakeMps(tmp_path).environ
    report = run(on_cpu(), settings=(Setting(),), settle_s=0, measure_s=0.1, environ=environ)
    assert list(report["arms"]) == ["time slices"]
    assert list(report["failed"]) == ["MPS"]


def test_memory_is_told_in_one_line() -> None:
    engine = {"peak_gb": 60.04, "card_used_gb": 110.0, "card_gb": 141.0}
    trainer = {"peak_gb": 47.5, "card_used_gb": 111.5, "card_gb": 141.0}
    told = memory_line({"engine": engine, "trainer": trainer})
    assert told == "engine 60.0 GB, trainer 47.5 GB, 111.5 of the GPU's 141.0 GB taken"
