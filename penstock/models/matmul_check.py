"""Whether a GPU multiplies matrices right, asked once before anything is built on it.

It sounds like a needless question. On an H200 (driver 580, torch 2.11) a process that MPS allowed 60 % of the
multiprocessors got bfloat16 matmuls that were wrong by many orders of magnitude, for some sizes only, without
an error: training went on with NaN, generation with nonsense.
"""

import os
from collections.abc import Callable

import torch

from penstock.errors import UserError

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
