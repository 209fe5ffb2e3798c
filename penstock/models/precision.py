"""Formats of 16 bits: which there are, a matmul that is not rounded to them, and a guard for CPUs that promise
more than they can do.

Some virtual machines report AMX and then stop the process with an illegal instruction at the first
bfloat16 matmul. Nothing can be caught in the process itself, so another one tries it first.
"""

import functools
import logging
import subprocess
import sys

import torch
from torch.nn import functional

HALF_TYPES = (torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)

PROBE = """
import torch
ones = torch.ones(32, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(ones, ones).sum().item()
"""


def guard_bfloat16(device: str) -> None:
    """Make bfloat16 matmul safe in this process; on an honest machine nothing changes."""
    if not device.startswith("cpu") or _matmul_works():
        return
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    log.warning(
        "this machine's CPU reports bfloat16 instructions that it does not run, so oneDNN is off and "
        "bfloat16 is slow here; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment is faster"
    )


@functools.cache
def _matmul_works() -> bool:
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=120, check=False)
    return probe.returncode == 0


def float32_matmul(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a linear layer of 16 bits adds up to, in float32."""
    if not rows.is_cuda:
        return functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    result = torch.mm(rows, weight.T, out_dtype=torch.float32)
    return result if bias is None else result.add_(bias)
