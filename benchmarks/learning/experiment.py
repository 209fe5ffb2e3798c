"""`python -m benchmarks learning`: does training on stale samples learn as well, and faster?

Four parts: imposed staleness with and without correction; each `staleness.late` policy under stragglers; a LoRA
adapter against full fine-tuning (all in one process each, on a schedule, so that curves do not depend on the
machine); and with real processes the time to a target reward, asynchronous against synchronous. A fifth runs only
when it is asked for, since it is of another model: a mixture of experts whose routers err while it samples.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.learning import plots
from benchmarks.learning.arms import (
    LAGS,
    LORA,
    LORA_LEARNING_RATE,
    METHODS,
    ROUTING,
    ROUTING_BASELINE,
    TITLES,
    Arm,
    Curve,
    Setup,
)
from benchmarks.learning.processes import Race, time_to_target
from benchmarks.learning.statistics import Estimate, areas, first_crossing, gain, ratios
from penstock.api import cache_folder
from penstock.demo.model import open_builtin
from penstock.loop.admission import Late

LATE: tuple[Late, ...] = ("mask", "wait", "drop", "correct")
LATE_BOUND = 4
LORA_ARM = "lora/0"
MIN_SHARE_OF_LAG = 0.75
"""Of the nominal staleness, that must be measured."""
MAX_LOGPROB_GAP = 1e-4
"""Between sampler and trainer, on the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of the experiment runs: which arms, over how many seeds, in how many processes."""

    methods: Sequence[str] = tuple(METHODS)
    lags: Sequence[int] = LAGS
    seeds: int = 6
    late: Sequence[Late] = LATE
    late_seeds: int = 4
    lora_seeds: int = 5
    routing_seeds: int = 0
    race: Race | None = field(default_factory=Race)
    workers: int = 2
    model: str = "builtin"
    baseline: str = "default/0"
    """The arm that areas are relative to."""

    def jobs(self) -> Iterator[tuple[Arm, int]]:
        """Arms with their seeds. On-policy, every method has the same gradient: it runs once, for all others are
        compared with it."""
        for seed in range(self.seeds):
            for lag in self.lags:
                for method in self.methods if lag else ("default",):
                    yield Arm(name=f"{method}/{lag}", algorithm=METHODS[method], lag=lag), seed
        for seed in range(self.late_seeds):
            for late in self.late:
                yield Arm(name=f"late/{late}", lag=LATE_BOUND, late=late), seed
        for seed in range(self.lora_seeds):
            yield Arm(name=LORA_ARM, lora=LORA, learning_rate=LORA_LEARNING_RATE), seed
        for seed in range(self.routing_seeds):
            for name, routers in ROUTING.items():
                yield Arm(name=name, routers=routers), seed


FULL = Plan()
PARTS: Mapping[str, Plan] = {
    **{method: Plan(methods=(method,), late=(), lora_seeds=0, race=None) for method in METHODS},
    "late": Plan(methods=(), lags=(0,), seeds=FULL.late_seeds, lora_seeds=0, race=None),
    "lora": Plan(methods=(), lags=(0,), seeds=FULL.lora_seeds, late=(), race=None),
    "race": Plan(methods=(), lags=(), late=(), lora_seeds=0),
    "routing": Plan(
        methods=(),
        lags=(),
        late=(),
        lora_seeds=0,
        routing_seeds=5,
        race=None,
        model="builtin-moe",
        baseline=ROUTING_BASELINE,
    ),
}
"""What `--only` runs. Unless it is the race also the runs that areas are relative to."""


def run(
    json_path: Path | None = None,
    *,
    plan: Plan = FULL,
    setup: Setup | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """The whole experiment; the report, its curves and its pictures go beside `json_path`."""
    console = console or Console()
    plots.load_pyplot()
    if setup is None:
        setup = Setup(model=open_builtin(plan.model, cache_folder(), log=console.print))
    curves = run_jobs(
        list(plan.jobs()), setup, plan.workers, lambda line: console.print(line, highlight=False)
    )
    race = None
    if plan.race is not None:
        race = time_to_target(setup, plan.race, lambda line: console.print(line, highlight=False))
    report = assemble(curves, race, plan, setup)
    console.print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
        draw(curves, race, plan, setup, json_path)
    return report


def run_jobs(
    jobs: Sequence[tuple[Arm, int]], setup: Setup, workers: int, log: Callable[[str], None]
) -> list[Curve]:
    """Every job in a process with one thread; in this process when there is one worker."""
    if workers == 1:
        pending = (run_job(arm, seed, setup) for arm, seed in jobs)
        return [_said(curve, log) for curve in pending]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_job, arm, seed, setup) for arm, seed in jobs]
        return [_said(future.result(), log) for future in futures]


def run_job(arm: Arm, seed: int, setup: Setup) -> Curve:
    """One run, checked: what was imposed must be what was measured."""
    from benchmarks.learning.lagged import run_lagged
    from benchmarks.learning.stragglers import run_stragglers

    if arm.late is not None:
        return run_stragglers(arm, seed, setup)
    curve = run_lagged(arm, seed, setup)
    if curve.staleness_mean < MIN_SHARE_OF_LAG * arm.lag:
        raise RuntimeError(f"{arm.name}: measured staleness {curve.staleness_mean:.2f}, nominal {arm.lag}")
    is_free = arm.routers is not None and arm.routers.noise > 0 and not arm.routers.replays
    if curve.logprob_gap_max > MAX_LOGPROB_GAP and not is_free:
        raise RuntimeError(f"{arm.name}: sampler and trainer differ by {curve.logprob_gap_max:.2g}")
    return curve


def assemble(
    curves: Sequence[Curve], race: dict[str, Any] | None, plan: Plan, setup: Setup
) -> dict[str, Any]:
    """The report: headline, an entry per arm, the race, the settings, and every curve."""
    synchronous = of_arm(curves, plan.baseline)
    arms = {}
    for name in dict.fromkeys(curve.arm for curve in curves):
        runs = of_arm(curves, name)
        arms[name] = {
            "area": describe(areas(runs, synchronous, setup.target)),
            "area_ratio": describe(ratios(runs, synchronous, setup.target)),
            "final_reward": describe(Estimate.of([run.rewards[-1] for run in runs])),
            "staleness_mean": sum(run.staleness_mean for run in runs) / len(runs),
            "staleness_max": max(run.staleness_max for run in runs),
            "ess_mean": sum(run.ess_mean for run in runs) / len(runs),
            "kl_mean": sum(run.kl_mean for run in runs) / len(runs),
            "masked_fraction": sum(run.masked_fraction for run in runs) / len(runs),
            "ticks_to_target": [first_crossing(run.ticks, run.rewards, setup.target) for run in runs],
            "ticks_total": [run.ticks[-1] for run in runs],
            "routing": {key: sum(run.routing[key] for run in runs) / len(runs) for key in runs[0].routing},
            "drops": {key: sum(run.drops.get(key, 0) for run in runs) for run in runs for key in run.drops},
        }
    gains = {
        lag: gain(of_arm(curves, f"default/{lag}"), of_arm(curves, f"none/{lag}"), synchronous, setup.target)
        for lag in plan.lags
        if lag and {"default", "none"} <= set(plan.methods)
    }
    return {
        "headline": headline(arms, gains, race),
        "arms": arms,
        "correction_gain": {
            str(lag): {**describe(estimate), "sigmas": estimate.sigmas} for lag, estimate in gains.items()
        },
        "race": race,
        "setup": {key: value for key, value in dataclasses.asdict(setup).items() if key != "model"},
        "curves": [compact(curve) for curve in curves],
    }


def headline(
    arms: dict[str, Any], gains: dict[int, Estimate], race: dict[str, Any] | None
) -> dict[str, float]:
    """The numbers that the experiment is for; those of parts that did not run are left out."""
    numbers: dict[str, float] = {}
    if "default/4" in arms:
        numbers["auc_ratio_staleness_4"] = arms["default/4"]["area_ratio"]["mean"]
    if LORA_ARM in arms:
        numbers["auc_ratio_lora"] = arms[LORA_ARM]["area_ratio"]["mean"]
    for name in ROUTING:
        if name in arms and name != ROUTING_BASELINE:
            numbers[f"auc_ratio_{name.replace('/', '_')}"] = arms[name]["area_ratio"]["mean"]
    if 16 in gains:
        numbers["correction_gain_sigmas_staleness_16"] = gains[16].sigmas
    if race is not None and race["ratio"] is not None:
        numbers["time_to_target_ratio"] = race["ratio"]
    return numbers


def draw(
    curves: Sequence[Curve], race: dict[str, Any] | None, plan: Plan, setup: Setup, json_path: Path
) -> None:
    """Pictures beside the JSON: NAME-staleness.png and so on."""

    def place(what: str) -> Path:
        return json_path.with_name(f"{json_path.stem}-{what}.png")

    synchronous = of_arm(curves, plan.baseline)
    by_method = {
        method: {lag: of_arm(curves, f"{method}/{lag}") or synchronous for lag in plan.lags}
        for method in plan.methods
    }
    if by_method:
        plots.plot_staleness(by_method, setup, place("staleness"), TITLES)
        ratio_of = {
            method: {lag: ratios(runs, synchronous, setup.target) for lag, runs in by_lag.items()}
            for method, by_lag in by_method.items()
        }
        plots.plot_ratios(ratio_of, place("ratios"))
    if plan.routing_seeds:
        plots.plot_routing({name: of_arm(curves, name) for name in ROUTING}, setup, place("routing"))
    late = {str(name): of_arm(curves, f"late/{name}") for name in plan.late}
    if late:
        plots.plot_late(late, setup, place("late"))
    if race is not None:
        plots.plot_race(race["runs"], setup.target, place("race"))


def of_arm(curves: Sequence[Curve], name: str) -> list[Curve]:
    return [curve for curve in curves if curve.arm == name]


def describe(estimate: Estimate) -> dict[str, Any]:
    return {
        "mean": estimate.mean,
        "standard_error": estimate.standard_error,
        "values": [round(value, 5) for value in estimate.values],
    }


def compact(curve: Curve) -> dict[str, Any]:
    plain = dataclasses.asdict(curve)
    plain["rewards"] = [round(reward, 5) for reward in curve.rewards]
    return plain


def table(report: dict[str, Any]) -> Table:
    shown = Table("arm", "staleness", "ESS", "area / synchronous", "final reward")
    for name, arm in report["arms"].items():
        ratio, final = arm["area_ratio"], arm["final_reward"]
        shown.add_row(
            name,
            f"{arm['staleness_mean']:.2f} (max {arm['staleness_max']:.0f})",
            f"{arm['ess_mean']:.2f}",
            f"{ratio['mean']:.3f} ± {ratio['standard_error']:.3f}",
            f"{final['mean']:.3f} ± {final['standard_error']:.3f}",
        )
    for name, number in report["headline"].items():
        shown.add_row(name, "", "", f"{number:.3f}", "")
    return shown


def _said(curve: Curve, log: Callable[[str], None]) -> Curve:
    log(f"{curve.arm}, seed {curve.seed}: held-out reward {curve.rewards[-1]:.3f} ({curve.seconds:.0f} s)")
    return curve
