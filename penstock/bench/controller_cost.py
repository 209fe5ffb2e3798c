"""Measures the CPU time that the controller's process spends on an episode (`python -m benchmarks controller`).

It runs the demo (answers of about four tokens, real engines, trainer and scorers) without evaluations and
without a terminal, because with short answers this cost sets the pace of a run. The time of all threads of
this process counts, in the training phase alone; workers are other processes, so their time does not count.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.api import cache_folder
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.observe.readers import show
from penstock.observe.status import RunStatus
from penstock.observe.views import SilentView
from penstock.run.arguments import DEMO
from penstock.run.preflight import prepare
from penstock.run.run import Run
from penstock.run.summary import Summary

STEPS = 60


class CpuView(SilentView):
    """Sums the CPU time that passes while the run is in its training phase."""

    def __init__(self, cpu_s: Callable[[], float] = time.process_time) -> None:
        super().__init__()
        self.training_s = 0.0
        self._cpu_s = cpu_s
        self._since: float | None = None

    def update(self, status: RunStatus) -> None:
        is_training = status.phase == "training"
        if is_training and self._since is None:
            self._since = self._cpu_s()
        elif not is_training and self._since is not None:
            self.training_s += self._cpu_s() - self._since
            self._since = None


def run(
    json_path: Path | None = None, *, steps: int = STEPS, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Train the demo for some steps; `overrides` are settings as on the command line."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        own = ("eval.tasks=null", f"run.steps={steps}", f"run.folder={folder}", *overrides)
        config = load_config(PenstockConfig, DEMO, own)
        prepared = prepare(config, log=console.print, cache=cache_folder())
        view = CpuView()
        summary = asyncio.run(Run(prepared, show(view)).run())
    report = cost(summary, view.training_s)
    console.print(sentence(report), highlight=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def cost(summary: Summary, cpu_s: float) -> dict[str, Any]:
    """Return the figures of a run. `controller_busy` is the share of one core that the controller took."""
    return {
        "headline": {"controller_us_per_episode": cpu_s / summary.samples * 1e6},
        "episodes": summary.samples,
        "tokens_per_episode": summary.tokens / summary.samples,
        "controller_cpu_s": cpu_s,
        "controller_busy": cpu_s / summary.training_s,
        "training_s": summary.training_s,
        "episodes_per_s": summary.samples / summary.training_s,
        "trainer_waited": summary.trainer_time["waited"],
        "engine_worked": summary.engine_time["worked"],
    }


def sentence(report: dict[str, Any]) -> str:
    return (
        f"controller: {report['headline']['controller_us_per_episode']:.0f} µs of CPU an episode of "
        f"{report['tokens_per_episode']:.1f} tokens, {report['controller_busy']:.0%} of a core; "
        f"{report['episodes']:,} episodes, {report['episodes_per_s']:,.0f} a second; the trainer waited "
        f"{report['trainer_waited']:.0%} of the time, engines worked {report['engine_worked']:.0%}"
    )
