import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks import journal_cost
from benchmarks.journal_cost import Arm, compared, pair, sentence
from penstock.bench.controller_cost import CpuView
from penstock.bench.loop_settings import Setting
from penstock.bench.saved_report import SavedReport
from penstock.rollout.config import RolloutConfig


def arm(episodes_per_s: float, cpu: float) -> Arm:
    return {
        "episodes_per_s": episodes_per_s,
        "controller_us_per_episode": cpu,
        "trainer_waited": 0.5,
        "engine_worked": 0.98,
    }


def test_the_median_of_the_ratios_of_pairs_counts() -> None:
    measured = [(arm(98, 130), arm(100, 100)), (arm(50, 150), arm(40, 90)), (arm(9, 111), arm(10, 101))]
    result = compared(measured)
    assert result["ratio"] == 0.98
    assert result["ratio_quartiles"] == [0.94, 1.115]
    assert result["controller_us_per_episode_more"] == 30
    assert sentence(result) == (
        "3 pairs: throughput with the journal 0.980 of without (quartiles 0.940 and 1.115), 30 µs of CPU more an "
        "episode in the controller; the trainer waited 50% of the time, engines worked 98%"
    )
    assert compared(measured[:1])["ratio_quartiles"] == [0.98, 0.98]


def test_both_arms_have_answers_under_way_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that come as one chunk would never be in the journal half made."""
    given: list[dict[str, Any]] = []

    def train(setting: Setting, *rest: Any, more: dict[str, Any], view: CpuView) -> Any:
        given.append(more)
        return SimpleNamespace(
            samples=9,
            training_s=1.0,
            tokens_per_s=1.0,
            trainer_time={"waited": 0.0},
            engine_time={"worked": 0.0},
        )

    monkeypatch.setattr(journal_cost, "train", train)
    monkeypatch.setattr(journal_cost, "ensure_builtin_model", lambda *rest, **options: Path())
    monkeypatch.setattr(journal_cost, "make_model", lambda *rest, **options: Path())
    journal_cost.run_generation_bound(SavedReport(None), Console(file=io.StringIO()), pairs=1)
    assert [one["rollout"]["chunk_tokens"] for one in given] == [RolloutConfig().chunk_tokens] * 2
    assert [one["run"]["journal"] for one in given] == [True, False]


def test_pairs_alternate_in_who_goes_first() -> None:
    order: list[bool] = []

    def one(journal: bool) -> Arm:
        order.append(journal)
        return arm(2.0 if journal else 1.0, 0)

    for first in (True, False):
        kept, plain = pair(one, first=first)
        assert (kept["episodes_per_s"], plain["episodes_per_s"]) == (2.0, 1.0)
    assert order == [True, False, False, True]


def test_every_arm_is_said_and_every_pair_saved_with_its_headline(tmp_path: Path) -> None:
    shown, path, saved = io.StringIO(), tmp_path / "report.json", []

    def one(journal: bool) -> Arm:
        saved.append(json.loads(path.read_text())["headline"] if path.exists() else {})
        return arm(1.96 if journal else 2.0, 0)

    console = Console(file=shown, width=200)
    journal_cost._compare(one, "cost", SavedReport(path), console, 2, headline="journal_throughput_ratio")
    assert saved == [{}, {}, {"journal_throughput_ratio": 0.98}, {"journal_throughput_ratio": 0.98}]
    assert shown.getvalue().splitlines()[0].startswith("cost, with the journal: 2.0 episodes/s (0 s")
    assert len(shown.getvalue().splitlines()) == 6
