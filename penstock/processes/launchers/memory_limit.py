"""How much memory a process that runs users' code may take. The controller says so in its environment, and the
process has the system enforce it: code that wants more gets a `MemoryError`, or takes its process along. Programs
that the code starts inherit it.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

NAME = "PENSTOCK_MEMORY_GB"
GB = 10**9
GROUP = Path("/sys/fs/cgroup")
LARGEST_SHARE = 0.5
"""Of the machine's memory, where no size is given."""


def machine_bytes(group: Path = GROUP) -> int:
    """The machine's memory, or the container's where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int((group / "memory.max").read_text()))
    except (OSError, ValueError):
        return machine


def memory_environment(memory_gb: float, *, is_on_gpu: bool = False) -> dict[str, str]:
    """The variable that tells a worker its limit; 0 leaves the size to the process. A GPU's driver maps more than
    it uses, so that there only a limit that was asked for holds."""
    return {} if is_on_gpu and not memory_gb else {NAME: str(memory_gb)}


def limit_memory(environment: Mapping[str, str]) -> int | None:
    """Limit this process from now on, where its environment says so; the limit in bytes."""
    if NAME not in environment:
        return None
    wanted = float(environment[NAME]) * GB or LARGEST_SHARE * machine_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = int(wanted) if hard == resource.RLIM_INFINITY else min(int(wanted), hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    return soft
