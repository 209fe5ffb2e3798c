"""Engines die while an evaluation starts and while it runs."""

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.errors import ScoringFailed, UserError, WorkerDied
from penstock.planner.simulation import SimulatedTokenizer
from penstock.records import Task
from penstock.run import evaluation_session as module
from penstock.run.evaluation_session import evaluate, pass_at, prepare_evaluation, report_of
from penstock.run.preflight import Prepared
from tests.run.scripted_run import LONGEST_S, Kill, ScriptedLauncher, ScriptedWorkers


def rewards_of(workers: ScriptedWorkers, folder: Path, said: list[str], patch: pytest.MonkeyPatch) -> Any:
    sections = {"eval": {"tasks": {}, "samples": 2}, "reward": {"workers": 1}, "run": {"restarts": 1}}
    prepared = Prepared(
        config=build(PenstockConfig, sections),
        model="m",
        tokenizer=SimulatedTokenizer(),  # type: ignore[arg-type]
        tasks=[],
        heldout=[Task(id="a", prompt="1+1=")],
        folder=folder,
        max_context=64,
    )
    patch.setattr(module, "LocalLauncher", lambda logs: ScriptedLauncher(workers))

    async def main() -> Any:
        async with asyncio.timeout(LONGEST_S):
            return await evaluate(prepared, said.append)

    return asyncio.run(main())


@pytest.mark.parametrize("where", ["launch", "load", "generate"])
def test_an_engine_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    workers, said = ScriptedWorkers(Kill(victim="engine0", who="engine0", where=where)), list[str]()
    assert rewards_of(workers, tmp_path, said, monkeypatch) == [[0.0, 1.0]]
    assert workers.launches == {"engine0": 2, "scorer0": 1}
    assert "restarting it; the others keep running" in said[0]
    assert said[1].startswith("engine0 is back at work, ")


@pytest.mark.parametrize("where", ["launch", "load", "generate"])
def test_an_engine_that_always_dies_ends_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    workers = ScriptedWorkers(Kill(victim="engine0", who="engine0", where=where, times=99))
    with pytest.raises(
        WorkerDied, match=r"^engine0 died 2 times in a row, so the run ends; the last time: worker "
    ):
        rewards_of(workers, tmp_path, [], monkeypatch)


def test_what_an_engine_lacks_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    kind = "tests.engines.scripted_kind:SCRIPTED"
    sections = {"model": {"name": "nowhere"}, "engine": {"kind": kind}}
    config = build(PenstockConfig, {**sections, "eval": {"tasks": {}, "temperature": 0}})
    with pytest.raises(UserError) as raised:
        prepare_evaluation(config, folder=tmp_path, log=print, cache=tmp_path, gpus=())
    assert str(raised.value) == (
        f"engine.kind={kind} lacks seed (for run.seed=0), greedy (for eval.temperature=0); change the setting, or "
        "choose another engine.kind"
    )
    assert list(tmp_path.iterdir()) == []


FAILED = ScoringFailed("the reward raised", "score_error")


@pytest.mark.parametrize(
    ("num", "correct", "k"), [(4, 1, 1), (4, 1, 2), (5, 2, 3), (6, 0, 2), (3, 3, 2), (4, 3, 4)]
)
def test_pass_at_k_is_the_share_of_all_choices(num: int, correct: int, k: int) -> None:
    choices = list(itertools.combinations([True] * correct + [False] * (num - correct), k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(k, num=num, num_correct=correct) == pytest.approx(expected)


def test_a_report_has_means_over_tasks() -> None:
    report = report_of([[1.0, 0.0, 0.5], [1.0, 1.0, 1.0], FAILED], samples=3, correct=1.0)
    assert report.reward == pytest.approx(0.75)
    assert report.error == pytest.approx(0.25)
    assert list(report.pass_at) == [1, 2, 3]
    assert list(report.pass_at.values()) == pytest.approx([2 / 3, 5 / 6, 1.0])
    assert (report.num_tasks, report.num_answers, report.num_failed) == (2, 6, 1)


def test_an_answer_that_failed_is_wrong() -> None:
    assert report_of([[1.0]], samples=2, correct=1.0).pass_at == {1: 0.5, 2: 1.0}


def test_what_is_correct_can_be_said() -> None:
    assert report_of([[0.4], [0.6]], samples=1, correct=0.5).pass_at == {1: 0.5}


def test_without_a_score_there_is_no_mean() -> None:
    report = report_of([FAILED], samples=1, correct=1.0)
    assert math.isnan(report.reward)
    assert math.isnan(report.error)
    assert (report.num_failed, report.failure) == (1, "the reward raised")
