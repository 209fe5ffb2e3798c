"""The command in short: real processes of the demo; and what a command leaves that is cut off."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from penstock.bench.chaos import chaos_report
from penstock.bench.chaos.chaos_report import run
from penstock.bench.chaos.faults import Fault
from penstock.errors import PenstockError


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_keeps_its_promises(tmp_path: Path) -> None:
    report = run(tmp_path / "report.json", kills=2, seed=0, steps=20, longest_s=2.0, folder=tmp_path / "run")
    assert report["headline"]["violations"] == 0, report
    assert report["headline"]["kills"] == 2
    assert report["ended"] == "after its last step"
    assert json.loads((tmp_path / "report.json").read_text())["headline"] == report["headline"]


class FakeRun:
    """Suffers everything; the third fault ends the command, or the run itself."""

    def __init__(self, folder: Path, *, steps: int, seed: int) -> None:
        self.run, self.steps = folder, steps
        self.complaints: list[str] = []
        self.is_running = False
        self.num_kills = self.num_faults = 0

    def begin(self) -> None:
        self.is_running = True

    def apply(self, fault: Fault, num_bytes: int, *, wait: bool) -> bool:
        self.num_faults += 1
        if self.num_faults == 3:
            self.fail()
        return True

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def kill(self) -> None:
        self.is_running = False
        self.num_kills += 1
        self.complaints.append("a group was trained twice")

    def regenerated_fraction(self) -> float:
        return 0.25


def test_a_command_that_is_terminated_leaves_its_faults_and_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_report, "DisturbedRun", FakeRun)
    path, before = tmp_path / "report.json", signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(path, kills=9, seed=5, longest_s=0.0, folder=tmp_path / "run")
    report = json.loads(path.read_text())
    assert report["headline"] == {
        "violations": 1,
        "kills": 2,
        "engine_recovery_s": None,
        "trainer_recovery_s": None,
        "regenerated_fraction": 0.25,
    }
    assert (report["ended"], report["complaints"]) == ("cut off", ["a group was trained twice"])
    assert Counter(row["fault"] for row in report["suffered"]) == report["faults"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_stands_still_is_a_violation_of_a_report_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(FakeRun):
        def fail(self) -> None:
            raise PenstockError("the run stands still for 600 s")

    monkeypatch.setattr(chaos_report, "DisturbedRun", Stuck)
    report = run(tmp_path / "report.json", kills=9, longest_s=0.0, folder=tmp_path / "run")
    assert report["complaints"] == ["the run stands still for 600 s", "a group was trained twice"]
    assert report["ended"] == "given up"


def test_a_run_that_dies_at_every_start_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(FakeRun):
        def begin(self) -> None:
            pass

        def note_end(self) -> None:
            self.complaints.append("the run ended by itself: no model")

    monkeypatch.setattr(chaos_report, "DisturbedRun", Dead)
    report = run(tmp_path / "report.json", kills=9, longest_s=0.0, folder=tmp_path / "run")
    assert report["ended"] == "given up"
    assert report["complaints"][5] == "no more faults after 5 violations"
