"""The end of a decode step, as one small kernel: write down what was drawn and move every row on."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from penstock.engines.embedded.cuda.buffers import DecodeBuffers

STOPS = 8
"""Stop tokens of a request that the device looks for; the host finds the others."""


@triton.jit
def _advance_kernel(
    drawn, logprobs, tokens, positions, ended, lengths, stops, output_tokens, output_logprobs, step,
    rows, window, stop_stride, STOPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program for all rows: they are few, and all need the step before it is counted up. Positions are the
    first row of `positions`."""
    column = tl.load(step)
    for start in range(0, rows, SIZE):
        row = start + tl.arange(0, SIZE)
        real = row < rows
        token = tl.load(drawn + row, mask=real, other=0)
        was_over = tl.load(ended + row, mask=real, other=1)
        over = was_over
        place = tl.load(positions + row, mask=real, other=0)
        length = tl.load(lengths + row, mask=real, other=0)
        tl.store(output_tokens + row * window + column, token, mask=real)
        tl.store(
            output_logprobs + row * window + column, tl.load(logprobs + row, mask=real, other=0.0), mask=real
        )
        tl.store(lengths + row, tl.where(was_over == 0, length + 1, length), mask=real)
        for number in tl.static_range(STOPS):
            stop = tl.load(stops + number * stop_stride + row, mask=real, other=-1)
            over = tl.where(token == stop, 1, over)
        tl.store(ended + row, over, mask=real)
        tl.store(tokens + row, token, mask=real)
        tl.store(positions + row, tl.where(was_over == 0, place + 1, place), mask=real)
    tl.store(step, column + 1)


def advance(
    drawn: torch.Tensor, logprobs: torch.Tensor, *, buffers: "DecodeBuffers", first_stop: int
) -> None:
    """Write `drawn` into the outputs' next column and make it the next input. A row that draws one of its stop
    tokens ends: `lengths` counts what was drawn up to then, and its position stays from then on."""
    rows = len(drawn)
    stops = buffers.ints[first_stop:]
    _advance_kernel[(1,)](
        drawn, logprobs, buffers.tokens, buffers.ints, buffers.ended, buffers.lengths, stops,
        buffers.output_tokens, buffers.output_logprobs, buffers.step,
        rows, buffers.output_tokens.shape[1], stops.stride(0),
        STOPS=len(stops), SIZE=min(1024, triton.next_power_of_2(rows)), num_warps=8,
    )  # fmt: skip
