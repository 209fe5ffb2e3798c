"""`penstock bench loop`: the same work synchronously and asynchronously, in two settings.

Synchronous is `max_staleness=0`: one phase at a time, each free to use every core. Asynchronous is
`max_staleness=4` with the same engines, the same seed and the same number of steps. In the long-tailed
setting each rollout also waits on an environment whose latency is log-normal, with median 0.2 of the
synchronous trainer's measured step and p90 five times the median. On a GPU, or when asked for, also what
engine and trainer do on one GPU (`penstock.bench.shared_gpu`).
"""

import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from penstock.api import cache_folder
from penstock.bench import shared_gpu as colocated
from penstock.bench.workload import EndlessTokenizer, make_model, make_tasks
from penstock.config.loader import build
from penstock.demo.latency import LogNormalLatency
from penstock.demo.model import ensure_builtin_model
from penstock.models.load import resolve_device
from penstock.observe.views import SilentView
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.session import Session
from penstock.orchestration.summary import Summary
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.workflow import Workflow
from penstock.types import Task, Turn

Part = Literal["settings", "colocated"]
GROUPS, GROUP_SIZE, STALENESS = 8, 8, 4
MEDIAN_OF_STEP, P90_OVER_MEDIAN = 0.2, 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model, how much is generated and trained a step, and whether rollouts wait on an environment."""

    name: str
    width: int
    layers: int
    prompt_tokens: int
    new_tokens: int
    steps: int
    waits: bool = False


SETTINGS = (
    # A narrow model: a decode step costs nearly what it does for a wide one, training far less.
    Setting(name="generation_bound", width=64, layers=2, prompt_tokens=16, new_tokens=96, steps=60),
    Setting(name="long_tail", width=192, layers=3, prompt_tokens=64, new_tokens=16, steps=40, waits=True),
)


class SlowEnvironment:
    """A single turn whose episode ends only when its environment has answered; held-out ones do not wait."""

    def __init__(self, latency: LogNormalLatency) -> None:
        self._latency = latency

    async def run(self, task: Task, rollout: Rollout) -> Turn:
        turn = await rollout.generate(task.prompt)
        if not rollout.spec.is_evaluation:
            await asyncio.sleep(self._latency.draw())
        return turn


def run(
    json_path: Path | None = None,
    *,
    only: Part | None = None,
    shape: str | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Both parts, or only one. `shape` and `compiled` are for engine and trainer on one GPU."""
    console = Console()
    report: dict[str, Any] = {"headline": {}}
    if only != "colocated":
        results = run_settings(console)
        console.print(table(results))
        report["headline"] = {
            "long_tail_speedup": results["long_tail"]["speedup"],
            "long_tail_trainer_idle": results["long_tail"]["asynchronous"]["trainer_idle"],
            "generation_bound_speedup": results["generation_bound"]["speedup"],
        }
        report |= results
    has_gpu = resolve_device("auto") != "cpu"
    if only == "colocated" or (only is None and has_gpu):
        work = colocated.on_gpu(shape or "1.5b", compiled=compiled) if has_gpu else colocated.on_cpu()
        report["colocated"] = colocated.run(work, console=console)
        report["headline"] |= report["colocated"].pop("headline")
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def run_settings(console: Console) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        folder = Path(scratch)
        tokenizer = ensure_builtin_model(cache_folder(), log=console.print)
        for setting in SETTINGS:
            home = folder / setting.name
            model = make_model(home / "model", tokenizer, width=setting.width, layers=setting.layers)
            results[setting.name] = compare(setting, model, home, console)
    return results


def compare(setting: Setting, model: Path, folder: Path, console: Console) -> dict[str, Any]:
    """Both arms of one setting, and the ratio of their speeds."""
    step_s = 0.0
    if setting.waits:
        probe = dataclasses.replace(setting, steps=8, waits=False)
        step_s = measured_step_s(train(probe, 0, model, folder, None))
    arms: dict[str, Any] = {}
    for name, max_staleness in (("synchronous", 0), ("asynchronous", STALENESS)):
        workflow: Workflow | None = None
        if setting.waits:
            latency = LogNormalLatency(
                median_s=MEDIAN_OF_STEP * step_s, p90_over_median=P90_OVER_MEDIAN, seed=0
            )
            workflow = SlowEnvironment(latency)
        console.print(f"{setting.name}, {name}: {setting.steps} steps …", highlight=False)
        summary = train(setting, max_staleness, model, folder, workflow)
        arms[name] = {
            "steps_per_s": summary.steps / summary.training_s,
            "trainer_idle": summary.trainer_idle,
            "engine_idle": summary.engine_idle,
            "staleness_mean": summary.staleness_mean,
            "staleness_max": summary.staleness_max,
            "final_reward": summary.train_reward_end,
            "drops": summary.drops,
        }
    speedup = arms["asynchronous"]["steps_per_s"] / arms["synchronous"]["steps_per_s"]
    return {**arms, "speedup": speedup, "environment_median_s": MEDIAN_OF_STEP * step_s}


def train(
    setting: Setting, max_staleness: int, model: Path, folder: Path, workflow: Workflow | None
) -> Summary:
    config = build(
        PenstockConfig,
        {
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
        },
    )
    run_folder = Path(tempfile.mkdtemp(dir=folder))
    prepared = Prepared(
        config=config,
        model=str(model),
        tokenizer=EndlessTokenizer(str(model)),
        tasks=make_tasks(256, setting.prompt_tokens),
        heldout=[],
        folder=run_folder,
        max_context=512,
        workflow=workflow,
    )
    return asyncio.run(Session(prepared, SilentView()).run())


def measured_step_s(summary: Summary) -> float:
    """The synchronous trainer's own time per step."""
    return (1 - summary.trainer_idle) * summary.training_s / summary.steps


def table(results: dict[str, Any]) -> Table:
    shown = Table(
        "setting", "arm", "steps/s", "trainer idle", "engine idle", "staleness", "reward", "speed-up"
    )
    for name, result in results.items():
        for arm in ("synchronous", "asynchronous"):
            row = result[arm]
            shown.add_row(
                name,
                arm,
                f"{row['steps_per_s']:.2f}",
                f"{row['trainer_idle']:.0%}",
                f"{row['engine_idle']:.0%}",
                f"{row['staleness_mean']:.2f} (max {row['staleness_max']:.0f})",
                f"{row['final_reward']:.3f}",
                f"{result['speedup']:.2f}×" if arm == "asynchronous" else "",
            )
    return shown
