"""`penstock bench journal`: what the journal costs, as a ratio of throughputs of the same run with and without it.

Pairs are interleaved, and the median of their ratios counts: a machine that grows slower does so for both. The run
is the demo, whose answers have about four tokens: the worst case. A group of long answers costs the journal little
more, and takes the engines far longer.
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.api import cache_folder
from penstock.arguments import DEMO
from penstock.bench.controller_cost import CpuView
from penstock.config.loader import load_config
from penstock.observe.readers import show
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.preflight import prepare
from penstock.orchestration.session import Session

STEPS, PAIRS = 60, 10
Arm = dict[str, float]


def run(json_path: Path | None = None, *, pairs: int = PAIRS, steps: int = STEPS) -> dict[str, Any]:
    console = Console()

    def arm(journal: bool) -> Arm:
        return measure(journal, steps, lambda line: None)

    measured = []
    for index in range(pairs):
        measured.append(pair(arm, first=index % 2 == 0))
        console.print(sentence(measured), highlight=False, soft_wrap=True)
    result = report(measured)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def measure(journal: bool, steps: int, log: Callable[[str], None]) -> Arm:
    """One run, without evaluations and with a checkpoint at its end only."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        own = (
            "eval.tasks=null",
            f"run.steps={steps}",
            f"run.folder={folder}",
            f"run.checkpoint_every={10 * steps}",
            f"run.journal={str(journal).lower()}",
        )
        prepared = prepare(load_config(PenstockConfig, DEMO, own), log=log, cache=cache_folder())
        view = CpuView()
        summary = asyncio.run(Session(prepared, show(view)).run())
    return {
        "episodes_per_s": summary.samples / summary.training_s,
        "controller_us_per_episode": view.training_s / summary.samples * 1e6,
    }


def pair(arm: Callable[[bool], Arm], *, first: bool) -> tuple[Arm, Arm]:
    """(with, without), in the order that `first` says."""
    if first:
        return arm(True), arm(False)
    without = arm(False)
    return arm(True), without


def report(measured: Sequence[tuple[Arm, Arm]]) -> dict[str, Any]:
    ratios = [kept["episodes_per_s"] / plain["episodes_per_s"] for kept, plain in measured]
    extra = [
        kept["controller_us_per_episode"] - plain["controller_us_per_episode"] for kept, plain in measured
    ]
    return {
        "headline": {"journal_throughput_ratio": statistics.median(ratios)},
        "controller_us_per_episode_more": statistics.median(extra),
        "pairs": [{"with": kept, "without": plain} for kept, plain in measured],
    }


def sentence(measured: Sequence[tuple[Arm, Arm]]) -> str:
    so_far = report(measured)
    ratio = so_far["headline"]["journal_throughput_ratio"]
    return (
        f"{len(measured)} pairs: throughput with the journal {ratio:.3f} of without, "
        f"{so_far['controller_us_per_episode_more']:.0f} µs of CPU more an episode in the controller"
    )
