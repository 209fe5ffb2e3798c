"""What the journal costs: a ratio of throughputs of the same run with and without it.

Pairs are interleaved, and the median of their ratios counts: a machine that grows slower does so for both. The run
is the generation-bound one of `penstock bench loop`, with checkpoints on the way in both arms, and answers that
come in chunks, so that the journal has answers under way to keep. `short_answers` is the demo, whose answers have
four tokens: there the controller sets the pace, and the journal's own work shows most.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.api import cache_folder
from penstock.bench.controller_cost import CpuView
from penstock.bench.loop_settings import CHUNK_TOKENS, GENERATION_BOUND, STALENESS, Setting, train
from penstock.bench.saved_report import SavedReport
from penstock.bench.workload import make_model
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.demo.model import ensure_builtin_model
from penstock.observe.readers import show
from penstock.run.arguments import DEMO
from penstock.run.preflight import prepare
from penstock.run.run import Run
from penstock.run.summary import Summary

PAIRS = 10
DEMO_STEPS = 60
CHECKPOINTS = 3
"""In each arm."""
Arm = dict[str, float]


def run_generation_bound(
    report: SavedReport, console: Console, *, pairs: int = PAIRS, setting: Setting = GENERATION_BOUND
) -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        tokenizer = ensure_builtin_model(cache_folder(), log=console.print)
        model = make_model(Path(scratch) / "model", tokenizer, width=setting.width, layers=setting.layers)

        def arm(journal: bool) -> Arm:
            view = CpuView()
            more = {
                "rollout": {"chunk_tokens": CHUNK_TOKENS},
                "run": _run_section(journal, setting.steps),
            }
            summary = train(setting, STALENESS, model, Path(scratch), more=more, view=view)
            return arm_of(summary, view.training_s)

        _compare(arm, "cost", report, console, pairs, headline="journal_throughput_ratio")


def run_short_answers(report: SavedReport, console: Console, *, pairs: int = PAIRS) -> None:
    _compare(demo_arm, "short_answers", report, console, pairs)


def demo_arm(journal: bool, steps: int = DEMO_STEPS) -> Arm:
    """The demo without evaluations."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        section = {"steps": steps, "folder": folder, **_run_section(journal, steps)}
        own = ["eval.tasks=null", *(f"run.{key}={str(value).lower()}" for key, value in section.items())]
        config = load_config(PenstockConfig, DEMO, own)
        prepared = prepare(config, log=lambda line: None, cache=cache_folder())
        view = CpuView()
        summary = asyncio.run(Run(prepared, show(view)).run())
    return arm_of(summary, view.training_s)


def _run_section(journal: bool, steps: int) -> dict[str, Any]:
    return {"journal": journal, "checkpoint_every": max(1, steps // CHECKPOINTS), "keep_checkpoints": 1}


def arm_of(summary: Summary, cpu_s: float) -> Arm:
    """Shares of time say whether the run was generation-bound: its engines work, its trainer waits."""
    return {
        "episodes_per_s": summary.samples / summary.training_s,
        "tokens_per_s": summary.tokens_per_s,
        "controller_us_per_episode": cpu_s / summary.samples * 1e6,
        "trainer_waited": summary.trainer_time["waited"],
        "engine_worked": summary.engine_time["worked"],
    }


def _compare(
    arm: Callable[[bool], Arm],
    name: str,
    report: SavedReport,
    console: Console,
    pairs: int,
    headline: str | None = None,
) -> None:
    """Says every arm, and says and saves every pair, as it ends."""

    def told(journal: bool) -> Arm:
        begun = time.monotonic()
        made = arm(journal)
        console.print(
            f"{name}, {'with' if journal else 'without'} the journal: {made['episodes_per_s']:.1f} episodes/s "
            f"({time.monotonic() - begun:.0f} s with its start)",
            highlight=False,
            soft_wrap=True,
        )
        return made

    measured = []
    for index in range(pairs):
        measured.append(pair(told, first=index % 2 == 0))
        report.put(name, value=compared(measured))
        if headline is not None:
            report.headline({headline: report.data[name]["ratio"]})
        console.print(f"{name}, {sentence(report.data[name])}", highlight=False, soft_wrap=True)


def pair(arm: Callable[[bool], Arm], *, first: bool) -> tuple[Arm, Arm]:
    """(with, without), in the order that `first` says."""
    if first:
        return arm(True), arm(False)
    without = arm(False)
    return arm(True), without


def compared(measured: Sequence[tuple[Arm, Arm]]) -> dict[str, Any]:
    """The median of the ratios, and their quartiles."""
    ratios = sorted(kept["episodes_per_s"] / plain["episodes_per_s"] for kept, plain in measured)
    extra = [
        kept["controller_us_per_episode"] - plain["controller_us_per_episode"] for kept, plain in measured
    ]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "controller_us_per_episode_more": statistics.median(extra),
        "trainer_waited": statistics.median(kept["trainer_waited"] for kept, _ in measured),
        "engine_worked": statistics.median(kept["engine_worked"] for kept, _ in measured),
        "pairs": [{"with": kept, "without": plain} for kept, plain in measured],
    }


def sentence(result: dict[str, Any]) -> str:
    low, high = result["ratio_quartiles"]
    return (
        f"{len(result['pairs'])} pairs: throughput with the journal {result['ratio']:.3f} of without (quartiles "
        f"{low:.3f} and {high:.3f}), {result['controller_us_per_episode_more']:.0f} µs of CPU more an episode in "
        f"the controller; the trainer waited {result['trainer_waited']:.0%} of the time, engines worked "
        f"{result['engine_worked']:.0%}"
    )
