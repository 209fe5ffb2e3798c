"""How many cores this process may use: a job of a cluster or a container often has fewer than the machine."""

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use: microseconds of CPU time in a period, and the period."""


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """Those that it may be scheduled on, but no more than its container's share; at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, _share(cpu_max) or cores))


def _share(cpu_max: Path) -> int | None:
    """Whole cores, rounded up. None: no limit, or not known."""
    try:
        quota, period = cpu_max.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None
