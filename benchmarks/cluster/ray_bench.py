"""`python -m benchmarks ray`: a node that is lost, an engine that joins, Ray against local, the controller's cost
as engines grow from 10 to 1,000.

The first three run the demo on Ray nodes in namespaces of this machine (root needed). Times are of this
machine, with all nodes on its cores; the throughput of Ray against that of local processes is a ratio of two
runs, one after the other. Figures are printed and written as they are found."""

import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster.clustered_run import PENSTOCK, ClusteredRun
from benchmarks.cluster.namespaced_nodes import NamespacedCluster, NamespacedNode
from penstock.cli.scale import scale_run
from penstock.errors import PenstockError
from penstock.planner.config import SimulatedConfig
from penstock.planner.simulated_run import simulate

HEAD = {"CPU": 4, "home": 4}
ENGINE = {"CPU": 2, "engine": 1}
OUTSTANDING_STEPS = 5
"""Of the demo: all groups that are under way at a moment are trained so many steps later."""
FEW, MANY = 10, 1000
RUN_LIMIT_S = 200.0
Keep = Callable[[str, float], None]
GROUPS = 4000
STEPS = 120


def run(json_path: Path | None = None, *, only: str | None = None) -> dict[str, Any]:
    """`only`: `nodes`, `throughput` or `controller`."""
    report: dict[str, dict[str, float]] = {"headline": {}}

    def keep(name: str, value: float) -> None:
        """Each figure as it is found: what comes after it may fail."""
        report["headline"][name] = value
        print(f"{name}: {value}", flush=True)
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=2) + "\n")

    parts: dict[str, Callable[[Keep], None]] = {
        "controller": controller_cost,
        "nodes": lost_and_joined,
        "throughput": ray_against_local,
    }
    for name, part in parts.items():
        if only in (None, name):
            print(f"-- {name}", flush=True)
            part(keep)
    return report


def controller_cost(keep: Keep) -> None:
    """CPU time of the controller for a group, with 1,000 engines against 10, and as many groups."""
    costs = {count: simulate(_simulated(count)).controller_us_per_group for count in (FEW, MANY)}
    keep("controller_cost_growth", round(costs[MANY] / costs[FEW], 3))
    keep("controller_us_per_group", round(costs[MANY], 1))


def _simulated(engines: int) -> SimulatedConfig:
    sections: dict[str, Any] = {
        "engine": {"count": engines},
        "run": {"steps": GROUPS // engines},
        "rollout": {"group_size": 8, "groups_per_step": engines, "max_new_tokens": 8000},
        "simulation": {"ranks": 64 if engines == MANY else 1, "node_life_h": 100.0},
    }
    return SimulatedConfig.model_validate(sections)


def lost_and_joined(keep: Keep) -> None:
    """The demo on a head and three nodes with an engine each: one of two engines loses its node, then a third one
    joins."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        _cluster(3) as cluster,
        ClusteredRun(cluster, Path(name), "engine.count=2", "run.steps=4000") as training,
    ):
        training.wait_for_step(20)
        lost = node_of(cluster, "engine1")
        cluster.cut(lost.name)
        cut_at, step = time.monotonic(), training.steps
        noticed_at, _ = training.wait_for("engine1 (pid ")
        keep("node_loss_noticed_s", round(noticed_at - cut_at, 2))
        trained_at = training.wait_for_step(step + OUTSTANDING_STEPS + 1)
        keep("node_loss_recovery_s", round(trained_at - cut_at, 2))
        back_at, _ = training.wait_for("engine1 is back at work")
        keep("replacement_s", round(back_at - cut_at, 2))
        cluster.add(ENGINE)
        asked_at = time.monotonic()
        scale_run(str(training.folder), "engines=3")
        joined_at, _ = training.wait_for("engine2 joins after")
        keep("join_s", round(joined_at - asked_at, 2))
        lost.end()
        training.stop()


def ray_against_local(keep: Keep) -> None:
    """Tokens a second of the demo with one engine, on one Ray node against local processes: each twice, so that a
    machine which grows slower or faster meanwhile favours neither."""
    tokens, seconds = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, _cluster(0) as cluster:
        for number, kind in enumerate(("local", "ray", "ray", "local")):
            summary = _demo(cluster, Path(name), f"{kind}{number}", kind)
            tokens[kind] += summary["tokens"]
            seconds[kind] += summary["training_s"]
            print(f"{kind}: {summary['tokens'] / summary['training_s']:.0f} tokens/s", flush=True)
    speeds = {kind: tokens[kind] / seconds[kind] for kind in tokens}
    keep("ray_vs_local_throughput", round(speeds["ray"] / speeds["local"], 3))


def _demo(cluster: NamespacedCluster, folder: Path, name: str, kind: str) -> dict[str, Any]:
    """The summary of a run on the head node."""
    settings = (f"run.steps={STEPS}", "engine.count=1", "sync.transport=http", "eval.tasks=null")
    own = (f"run.name={name}", f"run.folder={folder}", f"launcher.kind={kind}", "observe.view=none")
    words = cluster.command(*PENSTOCK, "train", *settings, *own)
    done = subprocess.run(words, env=cluster.environment, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if done.returncode:
        raise PenstockError(f"the run on {kind} failed: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return summary


def node_of(cluster: NamespacedCluster, worker: str) -> NamespacedNode:
    """Where a worker runs."""
    for node in cluster.nodes.values():
        if any(worker in process.cmdline() for process in workers_on(node)):
            return node
    raise PenstockError(f"{worker} runs on no node")


def workers_on(node: NamespacedNode) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(node.init).children(recursive=True):
        try:
            if "penstock.worker" in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _cluster(num_engines: int) -> NamespacedCluster:
    here = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(here)}
    return NamespacedCluster(resources=[HEAD, *[ENGINE] * num_engines], environment=environment)
