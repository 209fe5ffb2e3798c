"""Where a GPU's time goes: shares of its kernels by kind, and the longest by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "experts' matmuls": ("groupproblemshape", "grouped_gemm", "grouped_mm"),
    "attention": ("flash", "fmha", "_decode_kernel", "_packed_kernel"),
    "other matmuls": ("nvjet", "gemm", "cublas", "splitk", "cutlass"),
    "recording": ("_record_kernel",),
    "sorting tokens by expert": ("sort", "radix", "topk", "histogram", "scan_", "devicescan"),
    "sampling": ("_draw_kernel", "_advance_kernel", "_gate_kernel", "logsumexp"),
    "copies": ("memcpy", "memset"),
}
"""Kinds by what is in the lower-case names of kernels; the first that fits. What fits none is element-wise."""
REST = "element-wise"


class KernelShares:
    """Filled when the block of `profiled` has ended. Empty without a GPU."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.shares: dict[str, float] = {}
        self.longest: list[tuple[str, float, int]] = []
        """Name, share and number of launches."""

    def fill(self, times_us: dict[str, tuple[float, int]]) -> None:
        """From microseconds and launches by the name of the kernel."""
        total = sum(time for time, _ in times_us.values())
        self.seconds = total / 1e6
        for name, (time, _) in times_us.items():
            kind = kind_of(name)
            self.shares[kind] = self.shares.get(kind, 0.0) + time / total
        ordered = sorted(times_us.items(), key=lambda item: -item[1][0])
        self.longest = [(name, time / total, count) for name, (time, count) in ordered[:10]]

    def table(self, title: str) -> Table:
        shown = Table("kernels", "share", title=title)
        for kind, share in sorted(self.shares.items(), key=lambda item: -item[1]):
            shown.add_row(kind, f"{share:.1%}")
        for name, share, count in self.longest:
            shown.add_row(f"  {count} × {name[:64]}", f"{share:.1%}", style="dim")
        return shown


def kind_of(name: str) -> str:
    lower = name.lower()
    for kind, parts in KINDS.items():
        if any(part in lower for part in parts):
            return kind
    return REST


@contextmanager
def profiled(on_gpu: bool) -> Iterator[KernelShares]:
    """What the GPU runs within the block, which must end with all of it done."""
    found = KernelShares()
    if not on_gpu:
        yield found
        return
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        yield found
        torch.cuda.synchronize()
    found.fill(_kernel_times(recorded))


def _kernel_times(recorded: Any) -> dict[str, tuple[float, int]]:
    device: Any = torch.profiler.DeviceType.CUDA
    return {
        event.key: (float(event.self_device_time_total), int(event.count))
        for event in recorded.key_averages()
        if event.device_type == device and event.self_device_time_total > 0
    }
