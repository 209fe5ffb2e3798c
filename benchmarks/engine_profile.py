"""`python -m benchmarks profile` says where the engine's time goes on a CPU: shares of operators by kind, and of
Python."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.profiler import ProfilerActivity, profile

from penstock.bench.engine_contenders import Workload, make_workload, run_engine
from penstock.bench.engine_cpu import SMALL, TINY, make_models
from penstock.bench.saved_report import SavedReport
from penstock.placement.shares import usable_cores

KINDS = {
    "matmuls": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "cache_reads_and_writes": ("aten::index_select", "aten::index_copy_"),
}

PROFILED_STEPS = 48


def run(json_path: Path | None = None, *, longest: int = 256) -> dict[str, Any]:
    """The workload of `penstock bench engine` on both of its shapes."""
    torch.set_num_threads(usable_cores())
    report, console = SavedReport(json_path), Console()
    for shape in (TINY, SMALL):
        model, _ = make_models(shape, "cpu", "float32")
        workload = make_workload(shape.config["vocab_size"], longest=longest)
        shares = profile_engine(model, workload)
        report.put("profile", shape.name, value=shares)
        told = ", ".join(f"{kind.replace('_', ' ')} {share:.0%}" for kind, share in shares.items())
        console.print(f"{shape.name}: {told}", highlight=False)
    return report.data


def profile_engine(model: nn.Module, workload: Workload) -> dict[str, float]:
    """Shares of the wall time of the first `PROFILED_STEPS` steps or so: every event costs the profiler time
    and memory, which also makes small operators look longer than they are."""
    lengths = tuple(min(length, PROFILED_STEPS) for length in workload.lengths)
    workload = Workload(prompts=workload.prompts, lengths=lengths)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        wall_us = run_engine(model, workload).seconds * 1e6
    shares = dict.fromkeys((*KINDS, "other_operators"), 0.0)
    for event in recorded.key_averages():
        shares[_kind(event)] += float(event.self_cpu_time_total) / wall_us
    return {**shares, "python": max(0.0, 1.0 - sum(shares.values()))}


def _kind(event: Any) -> str:
    for kind, prefixes in KINDS.items():
        if event.key.startswith(prefixes):
            return kind
    return "other_operators"
