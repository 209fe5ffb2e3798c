"""Limits the memory of processes that run users' code.

The controller passes the limit in the environment, and the process has the system enforce it. Code that needs
more gets a `MemoryError`, or crashes its process. Programs that the code starts inherit the limit.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

NAME = "PENSTOCK_MEMORY_GB"
GB = 10**9
GROUP = Path("/sys/fs/cgroup")
LARGEST_SHARE = 0.5
"""The share of the machine's memory that is the limit where no size is set."""


def machine_bytes(group: Path = GROUP) -> int:
    """Return the machine's memory, or the container's where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int((group / "memory.max").read_text()))
    except (OSError, ValueError):
        return machine


def memory_environment(memory_gb: float, *, is_on_gpu: bool = False) -> dict[str, str]:
    """Return the variable that passes a worker its limit; 0 leaves the size to the process.

    A GPU's driver maps more memory than it uses, so a GPU worker is limited only by a size that was set.
    """
    return {} if is_on_gpu and not memory_gb else {NAME: str(memory_gb)}


def limit_memory(environment: Mapping[str, str]) -> int | None:
    """Limit this process's memory if its environment says so, and return the limit in bytes."""
    if NAME not in environment:
        return None
    wanted = float(environment[NAME]) * GB or LARGEST_SHARE * machine_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = int(wanted) if hard == resource.RLIM_INFINITY else min(int(wanted), hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return soft
