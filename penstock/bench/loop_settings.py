"""Runs the settings of `penstock bench loop` on a CPU: the same work synchronously and asynchronously.

Both arms have the same engines, the same seed and the same number of steps; asynchronous is `max_staleness=4`. In
two settings each rollout also waits for an environment, with a median of 0.2 times the trainer's measured step. In
`long_tail` the wait is log-normal with p90 five times the median. In `slow_tenth` one answer in ten takes 25 times
as long as the median one, generation included; more than half of all groups have such an answer.
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from penstock.api import cache_folder
from penstock.bench.saved_report import SavedReport
from penstock.bench.slow_environment import (
    MEDIAN_OF_STEP,
    Latency,
    NoLatency,
    SlowEnvironment,
    answer_times,
    measured_step_s,
)
from penstock.bench.workload import EndlessTokenizer, make_model, make_tasks
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.demo.latency import LogNormalLatency, SlowTenthLatency
from penstock.demo.model import ensure_builtin_model
from penstock.observe.readers import show
from penstock.observe.views import SilentView, View
from penstock.placement.automatic import resolve_auto
from penstock.run.preflight import Prepared
from penstock.run.run import Run
from penstock.run.summary import Summary

GROUPS, GROUP_SIZE, STALENESS = 8, 8, 4
P90_OVER_MEDIAN, SLOW_OVER_MEDIAN = 5.0, 25.0
ARMS = {"synchronous": 0, "asynchronous": STALENESS}
PROBE_STEPS = 8
CHUNK_TOKENS = 32
"""The default of `rollout.chunk_tokens`, for benches that keep unfinished answers. The settings below change it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describes the model, how much is generated and trained per step, and what rollouts wait for."""

    name: str
    width: int
    layers: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    waits: Literal["log-normal", "slow tenth"] | None = None

    def latency(self, pace: "Pace") -> Latency:
        """Return the distribution of its rollouts' waits."""
        median_s = MEDIAN_OF_STEP * pace.step_s
        if self.waits == "slow tenth":
            slow_s = SLOW_OVER_MEDIAN * (pace.answer_s + median_s) - pace.answer_s
            return SlowTenthLatency(median_s=median_s, slow_s=slow_s, seed=0)
        return LogNormalLatency(median_s=median_s, p90_over_median=P90_OVER_MEDIAN, seed=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Holds what a setting takes synchronously without waits: the trainer for a step, an engine for an answer."""

    step_s: float
    answer_s: float


# A narrow model: a decode step costs nearly what it does for a wide one, training far less.
GENERATION_BOUND = Setting(
    name="generation_bound", width=64, layers=2, prompt_tokens=16, new_tokens=96, steps=60
)
LONG_TAIL = Setting(
    name="long_tail", width=192, layers=3, prompt_tokens=64, new_tokens=16, steps=40, waits="log-normal"
)
SLOW_TENTH = dataclasses.replace(LONG_TAIL, name="slow_tenth", steps=16, waits="slow tenth")
SETTINGS = (GENERATION_BOUND, LONG_TAIL, SLOW_TENTH)
QUICK = (
    dataclasses.replace(GENERATION_BOUND, steps=12),
    dataclasses.replace(LONG_TAIL, steps=8),
    dataclasses.replace(SLOW_TENTH, steps=6),
)
"""At most three minutes on two idle cores, with the controller's cost."""


def run(settings: tuple[Setting, ...], report: SavedReport, console: Console) -> None:
    """Run both arms of every setting, and save and print each as it ends."""
    pace: Pace | None = None
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        tokenizer = ensure_builtin_model(cache_folder(), log=console.print)
        for setting in settings:
            home = Path(scratch) / setting.name
            model = make_model(home / "model", tokenizer, width=setting.width, layers=setting.layers)
            if setting.waits and pace is None:  # settings with waits do the same work, so one pace serves all
                pace = measured_pace(setting, model, home)
                report.put("pace", value=dataclasses.asdict(pace))
            compare(setting, pace, model, home, report, console)
    console.print(table({setting.name: report.data[setting.name] for setting in settings}))


def measured_pace(setting: Setting, model: Path, folder: Path) -> Pace:
    probe = SlowEnvironment(NoLatency())
    summary = train(dataclasses.replace(setting, steps=PROBE_STEPS), 0, model, folder, probe)
    return Pace(step_s=measured_step_s(summary), answer_s=answer_times(probe.answer_s)["answer_median_s"])


def compare(
    setting: Setting, pace: Pace | None, model: Path, folder: Path, report: SavedReport, console: Console
) -> None:
    """Run both arms of one setting, and report the ratio of their speeds. `pace` is for settings with waits."""
    for name, max_staleness in ARMS.items():
        environment = SlowEnvironment(setting.latency(pace)) if setting.waits and pace else None
        summary = train(setting, max_staleness, model, folder, environment)
        arm = arm_of(summary) | answer_times(environment.answer_s if environment else ())
        report.put(setting.name, name, value=arm)
        console.print(f"{setting.name}, {name}: {sentence(arm)}", highlight=False, soft_wrap=True)
    result = report.data[setting.name]
    speedup = result["asynchronous"]["steps_per_s"] / result["synchronous"]["steps_per_s"]
    report.put(setting.name, "speedup", value=speedup)
    numbers = {f"{setting.name}_speedup": speedup}
    if setting.waits:
        numbers[f"{setting.name}_trainer_waited"] = result["asynchronous"]["trainer_waited"]
    report.headline(numbers)


def arm_of(summary: Summary) -> dict[str, Any]:
    return {
        "steps": summary.steps,
        "steps_per_s": summary.steps / summary.training_s,
        "tokens_per_s": summary.tokens_per_s,
        "trainer_waited": summary.trainer_time["waited"],
        "engine_worked": summary.engine_time["worked"],
        "staleness_mean": summary.staleness_mean,
        "staleness_max": summary.staleness_max,
        "final_reward": summary.train_reward_end,
        "drops": summary.drops,
    }


def sentence(arm: dict[str, Any]) -> str:
    return (
        f"{arm['steps']} steps, {arm['steps_per_s']:.2f} a second; {arm['tokens_per_s']:,.0f} tok/s; "
        f"the trainer waited {arm['trainer_waited']:.0%} of the time, engines worked {arm['engine_worked']:.0%}"
    )


def train(
    setting: Setting,
    max_staleness: int,
    model: Path,
    folder: Path,
    workflow: SlowEnvironment | None = None,
    *,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    view: View | None = None,
) -> Summary:
    """Train one arm. `more` holds further settings, by section."""
    prepared = prepared_run(setting, max_staleness, model, folder, workflow, more=more)
    return asyncio.run(Run(prepared, show(view or SilentView())).run())


def prepared_run(
    setting: Setting,
    max_staleness: int,
    model: Path,
    folder: Path,
    workflow: SlowEnvironment | None = None,
    *,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Prepared:
    """Prepare the run of one arm in a new folder below `folder`."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": str(model)},
        "reward": {"functions": ["penstock.bench.workload:reward"]},
        "engine": {"count": 2, "embedded": {"max_batch": 128}},
        "rollout": {
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS,
            "max_new_tokens": setting.new_tokens,
            "chunk_tokens": setting.new_tokens,
        },
        "staleness": {"max_staleness": max_staleness},
        "trainer": {"learning_rate": 5e-4, "micro_batch_tokens": 8192},
        "run": {"name": f"{setting.name}-{max_staleness}", "steps": setting.steps},
    }
    for name, section in (more or {}).items():
        sections[name] |= section
    config = build(PenstockConfig, sections)
    return Prepared(
        config=resolve_auto(config).config,
        model=str(model),
        tokenizer=EndlessTokenizer(str(model)),
        tasks=make_tasks(256, setting.prompt_tokens),
        heldout=[],
        folder=Path(tempfile.mkdtemp(dir=folder)),
        max_context=512,
        workflow=workflow,
    )


def table(results: dict[str, Any]) -> Table:
    """Return a table that fits 80 columns. Staleness is given as the mean and, in brackets, the largest."""
    names = ("setting", "arm", "steps/s", "trainer\nwaited", "engine\nworked", "stale", "reward", "speed-up")
    columns = (Column(name, no_wrap=True) for name in names)
    shown = Table(*columns, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name, result in results.items():
        for arm in ARMS:
            row = result[arm]
            shown.add_row(
                name,
                arm,
                f"{row['steps_per_s']:.2f}",
                f"{row['trainer_waited']:.0%}",
                f"{row['engine_worked']:.0%}",
                f"{row['staleness_mean']:.2f} ({row['staleness_max']:.0f})",
                f"{row['final_reward']:.3f}",
                f"{result['speedup']:.2f}×" if arm == "asynchronous" else "",
            )
    return shown
