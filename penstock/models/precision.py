"""A guard for bfloat16 on CPUs that promise more than they can do.

Some virtual machines report AMX and then stop the process with an illegal instruction at the first
bfloat16 matrix product. Nothing can be caught in the process itself, so another one tries it first.
"""

import functools
import logging
import subprocess
import sys

import torch

log = logging.getLogger(__name__)

PROBE = """
import torch
ones = torch.ones(32, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(ones, ones).sum().item()
"""


def guard_bfloat16(device: str) -> None:
    """Make bfloat16 products safe in this process; on an honest machine nothing changes."""
    if not device.startswith("cpu") or _products_work():
        return
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    log.warning(
        "this machine's CPU reports bfloat16 instructions that it does not run, so oneDNN is off and "
        "bfloat16 is slow here; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment is faster"
    )


@functools.cache
def _products_work() -> bool:
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=120, check=False)
    return probe.returncode == 0
