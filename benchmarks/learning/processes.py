"""Time to the target with real processes: asynchronous against synchronous, where rollouts wait on a
long-tailed environment.

Both arms are ordinary sessions on the built-in task with the library's defaults; they differ in
`max_staleness` alone. The environment's latency is that of `bench loop`: log-normal, its median 0.2 of
the measured trainer step, its p90 five times that. Held-out reward is sampled beside training, and a
measurement counts from the step that was finished when it was there.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.arms import Setup
from benchmarks.learning.statistics import Estimate, first_crossing
from penstock.bench.loop_settings import P90_OVER_MEDIAN, STALENESS
from penstock.bench.slow_environment import MEDIAN_OF_STEP, SlowEnvironment, measured_step_s
from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.demo.arithmetic import make_tasks
from penstock.demo.latency import LogNormalLatency
from penstock.models.tokenizer import ChatTokenizer
from penstock.observe.readers import show
from penstock.observe.views import SilentView
from penstock.placement.automatic import resolve_auto
from penstock.run.preflight import Prepared
from penstock.run.run import Run
from penstock.run.summary import Summary

MAX_CONTEXT = 64
PROBE_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """How the two arms are run and measured."""

    steps: int = 110
    eval_every: int = 10
    num_heldout: int = 256
    eval_samples: int = 2
    seeds: tuple[int, ...] = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Held-out reward against seconds of training, and the run's summary."""

    seconds: list[float]
    rewards: list[float]
    summary: Summary


def time_to_target(setup: Setup, race: Race, log: Callable[[str], None]) -> dict[str, Any]:
    """Both arms for each seed; the ratio of their times, and its mean."""
    rows, ratios = [], []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        folder = Path(scratch)
        step_s = measured_step_s(train(setup, race, folder, 0, 0, None, steps=PROBE_STEPS).summary)
        for seed in race.seeds:
            row: dict[str, Any] = {"seed": seed}
            for name, bound in (("synchronous", 0), ("asynchronous", STALENESS)):
                log(f"real processes, {name}, seed {seed}: {race.steps} steps …")
                latency = LogNormalLatency(
                    median_s=MEDIAN_OF_STEP * step_s, p90_over_median=P90_OVER_MEDIAN, seed=seed
                )
                timed = train(setup, race, folder, bound, seed, SlowEnvironment(latency))
                row[name] = facts(timed, setup.target)
            slow, fast = (row[name]["time_to_target_s"] for name in ("synchronous", "asynchronous"))
            row["ratio"] = fast / slow if fast is not None and slow is not None else None
            rows.append(row)
            if row["ratio"] is not None:
                ratios.append(row["ratio"])
    estimate = Estimate.of(ratios) if len(ratios) == len(rows) else None
    return {
        "ratio": None if estimate is None else estimate.mean,
        "ratio_standard_error": None if estimate is None else estimate.standard_error,
        "environment_median_s": MEDIAN_OF_STEP * step_s,
        "target": setup.target,
        "runs": rows,
    }


def facts(timed: Timed, target: float) -> dict[str, Any]:
    summary = timed.summary
    return {
        "time_to_target_s": first_crossing(timed.seconds, timed.rewards, target),
        "steps_per_s": summary.steps / summary.training_s,
        "trainer_waited": summary.trainer_time["waited"],
        "staleness_mean": summary.staleness_mean,
        "staleness_max": summary.staleness_max,
        "heldout_reward_end": summary.heldout_reward_end,
        "drops": summary.drops,
        "seconds": timed.seconds,
        "rewards": timed.rewards,
    }


def train(
    setup: Setup,
    race: Race,
    folder: Path,
    max_staleness: int,
    seed: int,
    workflow: SlowEnvironment | None,
    *,
    steps: int | None = None,
) -> Timed:
    """One session; `steps` is for a probe, which evaluates nothing in between."""
    config = build(
        PenstockConfig,
        {
            "model": {"name": setup.model},
            "reward": {"functions": "exact_match"},
            "engine": {"max_context": MAX_CONTEXT},
            "rollout": {
                "group_size": setup.group_size,
                "groups_per_step": setup.groups,
                "max_new_tokens": setup.max_new_tokens,
            },
            "staleness": {"max_staleness": max_staleness},
            "trainer": {
                "learning_rate": setup.learning_rate,
                "warmup_steps": setup.warmup_steps,
                "schedule": setup.schedule,
                "max_grad_norm": setup.max_grad_norm,
            },
            "run": {"name": "learning", "steps": steps or race.steps, "seed": seed},
            "eval": {"every": 0 if steps else race.eval_every, "samples": race.eval_samples},
        },
    )
    run_folder = Path(tempfile.mkdtemp(dir=folder))
    prepared = Prepared(
        config=resolve_auto(config).config,
        model=setup.model,
        tokenizer=ChatTokenizer(setup.model),
        tasks=make_tasks("train", size=setup.num_tasks, seed=0),
        heldout=make_tasks("heldout", size=race.num_heldout, seed=0),
        folder=run_folder,
        max_context=MAX_CONTEXT,
        workflow=workflow,
    )
    summary = asyncio.run(Run(prepared, show(SilentView())).run())
    seconds, rewards = read_curve(run_folder / "metrics.jsonl")
    return Timed(seconds=seconds, rewards=rewards, summary=summary)


def read_curve(path: Path) -> tuple[list[float], list[float]]:
    """Held-out rewards of a run, each at the time of the last step that was written before it."""
    seconds, rewards, now, start = [], [], 0.0, None
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "time_s" in row:
            if start is None:
                start = row["time_s"] - row["step_s"] - row["waited_s"]
            now = row["time_s"] - start
        elif "heldout_reward" in row:
            seconds.append(now)
            rewards.append(row["heldout_reward"])
    return seconds, rewards
