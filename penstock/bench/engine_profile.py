"""Where the engine's time goes: shares of operators by kind, and the rest, which is Python."""

from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from penstock.bench.engine_contenders import Workload, run_engine

KINDS = {
    "matmuls": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "cache_reads_and_writes": ("aten::index_select", "aten::index_copy_"),
}

PROFILED_STEPS = 48


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
