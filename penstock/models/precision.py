"""Handles 16-bit formats: which there are, a matmul that is not rounded to them, and guards against broken
hardware.

Some virtual machines report AMX, then stop the process with an illegal instruction at the first bfloat16
matmul. The process itself can't catch that, so another process tries it first.

On an H200 (driver 580, torch 2.11), a process that MPS limited to 60 % of the multiprocessors got bfloat16
matmuls that were wrong by many orders of magnitude. It happened for some sizes only, and without an error:
training continued with NaN, generation with nonsense. So a GPU is checked before anything is built on it.
"""

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch.nn import functional

from penstock.errors import UserError

HALF_TYPES = (torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)

PROBE = """
import torch
ones = torch.ones(32, 64, dtype=torch.bfloat16)
torch.nn.functional.linear(ones, ones).sum().item()
"""


def guard_bfloat16(device: str) -> None:
    """Make bfloat16 matmul on a CPU safe in this process. Nothing changes on a machine that runs the instructions
    that it reports."""
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
    """Return the result of a 16-bit linear layer in float32, without rounding it to 16 bits."""
    if not rows.is_cuda:
        return functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    result = torch.mm(rows, weight.T, out_dtype=torch.float32)
    return result if bias is None else result.add_(bias)


ROWS = (8, 512, 4096)
INNER, WIDTH = 1536, 8960
TOLERANCE = 0.02
"""bfloat16 rounds to about 0.002 here."""
LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def check_matmul(device: torch.device | str, multiply: Multiply = torch.matmul) -> None:
    """Multiply a few random matrices and compare with float32; refuse a GPU that gets them wrong."""
    draw = torch.Generator(device=device).manual_seed(0)
    right = torch.randn(INNER, WIDTH, generator=draw, device=device).bfloat16()
    for rows in ROWS:
        left = torch.randn(rows, INNER, generator=draw, device=device).bfloat16()
        part = slice(0, 8)
        got = multiply(left, right)[part].float()
        want = left[part].float() @ right.float()
        error = float((got - want).norm() / want.norm())
        if not error < TOLERANCE:
            limit = os.environ.get(LIMIT, "100")
            advice = f"; {LIMIT} is {limit}: unset it" if limit != "100" else ""
            raise UserError(
                f"matmul on {device} is wrong ({rows} x {INNER} x {WIDTH} in bfloat16 is off by a "
                f"factor of {error:.3g}){advice}"
            )
