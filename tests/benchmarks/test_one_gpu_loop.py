"""The GPU form of the loop bench, on a CPU with a tiny shape: real workers, imposed lengths."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.one_gpu_loop import LongTailedAnswers, run, settings, work_of
from penstock.bench.saved_report import SavedReport
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.errors import ConfigError
from penstock.records import SamplingParams, Task
from penstock.rollout.episode_spec import EpisodeSpec


def spec(group: int, index: int) -> EpisodeSpec:
    task = Task(id="t", prompt="1")
    return EpisodeSpec(group=group, index=index, task=task, sampling=SamplingParams())


@pytest.mark.processes
@pytest.mark.full
def test_both_arms_train_the_same_tokens_and_report_their_shares_of_time(tmp_path: Path) -> None:
    work = dataclasses.replace(
        work_of("tiny", on_gpu=False), steps=2, groups=2, median_tokens=6, max_tokens=24
    )
    report = SavedReport(tmp_path / "shape.json")
    run(work, report, Console(quiet=True))
    data = json.loads((tmp_path / "shape.json").read_text())
    answers = LongTailedAnswers(work)
    lengths = [answers.length(spec(group, index)) for group in range(4) for index in range(4)]
    for arm in ("synchronous", "asynchronous"):
        assert data[arm]["steps"] == 2
        assert data[arm]["answer_tokens_mean"] == pytest.approx(np.mean(lengths))
        assert data[arm]["trained_tokens_per_s"] > 0
        assert 0 <= data[arm]["trainer_waited"] <= 1 and 0 <= data[arm]["engine_worked"] <= 1
    assert data["synchronous"]["staleness_max"] == 0
    speedup = data["asynchronous"]["steps_per_s"] / data["synchronous"]["steps_per_s"]
    assert data["headline"]["shape_speedup"] == pytest.approx(speedup)
    assert data["headline"]["shape_trainer_waited"] == data["asynchronous"]["trainer_waited"]
    assert data["headline"]["shape_engine_worked"] == data["asynchronous"]["engine_worked"]


def test_lengths_are_long_tailed_and_belong_to_the_episode() -> None:
    work = work_of("1.5b", on_gpu=True)
    answers = LongTailedAnswers(work)
    lengths = [answers.length(spec(group, index)) for group in range(500) for index in range(8)]
    assert np.median(lengths) == pytest.approx(128, rel=0.08)
    assert np.quantile(lengths, 0.9) == pytest.approx(640, rel=0.12)
    assert max(lengths) == 1024 and min(lengths) >= 1
    assert answers.length(spec(3, 5)) == LongTailedAnswers(work).length(spec(3, 5))


def test_on_a_gpu_it_is_the_recipe_of_one_gpu() -> None:
    config = build(PenstockConfig, settings(work_of("1.5b", on_gpu=True), 4, Path("folder")))
    assert (config.sync.transport, config.engine.dtype, config.trainer.dtype) == (
        "cuda_ipc",
        "bfloat16",
        "bfloat16",
    )
    assert config.engine.embedded.compile == "on" and config.trainer.compile
    assert config.staleness.max_staleness == 4
    assert config.engine.max_context == 64 + 1024


def test_a_large_shape_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--shape 1.5b needs a GPU, and there is none; --shape tiny"):
        work_of("1.5b", on_gpu=False)
    with pytest.raises(ConfigError, match="--shape must be one of tiny, 135m, 1.5b, 7b, got 'huge'"):
        work_of("huge", on_gpu=True)
