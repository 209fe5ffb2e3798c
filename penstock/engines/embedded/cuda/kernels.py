"""The end of a decode step, as two small kernels: write down what was drawn and move every row on, and the gate
that new weights come in by."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from penstock.engines.embedded.cuda.buffers import DecodeBuffers

STOPS = 8
"""Stop tokens of a request that the device looks for; the host finds the others."""
STOPPED, STOOD_NS, WENT_ON, NEWEST, TOLD = range(5)
"""What the device tells the host: the update it stands still for, how long it stood for the last, which that was,
and the version of the newest tokens; and how many such numbers there are."""
PATIENCE_NS = 20_000_000_000
"""Copies take milliseconds: whoever stands still for this long has been forgotten."""


@triton.jit
def _advance_kernel(
    drawn, logprobs, tokens, positions, ended, lengths, stops, output_tokens, output_logprobs, step,
    version, output_versions, rows, window, stop_stride, STOPS: tl.constexpr, SIZE: tl.constexpr,
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
    tl.store(output_versions + column, tl.load(version))
    tl.store(step, column + 1)


def advance(
    drawn: torch.Tensor,
    logprobs: torch.Tensor,
    version: torch.Tensor,
    *,
    buffers: "DecodeBuffers",
    first_stop: int,
) -> None:
    """Write `drawn` into the outputs' next column, with the version whose weights are live, and make it the next
    input. A row that draws one of its stop
    tokens ends: `lengths` counts what was drawn up to then, and its position stays from then on."""
    rows = len(drawn)
    stops = buffers.ints[first_stop:]
    _advance_kernel[(1,)](
        drawn, logprobs, buffers.tokens, buffers.ints, buffers.ended, buffers.lengths, stops,
        buffers.output_tokens, buffers.output_logprobs, buffers.step,
        version, buffers.output_versions, rows, buffers.output_tokens.shape[1], stops.stride(0),
        STOPS=len(stops), SIZE=min(1024, triton.next_power_of_2(rows)), num_warps=8,
    )  # fmt: skip


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _trap():
    tl.inline_asm_elementwise("{ trap; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _gate_kernel(
    asked, opened, version, told,
    STOPPED: tl.constexpr, STOOD_NS: tl.constexpr, WENT_ON: tl.constexpr, NEWEST: tl.constexpr,
    PATIENCE_NS: tl.constexpr,
):  # fmt: skip
    """One warp, so that all threads see the same. `asked` and `told` are the host's memory. A gate that nobody
    opens ends with an error instead of a hang."""
    tl.store(told + NEWEST, tl.load(version))
    ticket = tl.load(asked, volatile=True)
    seen = tl.load(opened, volatile=True)
    if seen < ticket:
        start = _nanoseconds()
        tl.store(told + STOPPED, ticket)
        now = start
        while (seen < ticket) & (now - start < PATIENCE_NS):
            seen = tl.load(opened, volatile=True)
            now = _nanoseconds()
        if seen < ticket:
            _trap()
        tl.store(told + STOOD_NS, _nanoseconds() - start)
        tl.store(told + WENT_ON, ticket)


def stop_if_asked(
    asked: torch.Tensor, opened: torch.Tensor, version: torch.Tensor, told: torch.Tensor
) -> None:
    """Stand still while `asked`, a number of the host's, is above `opened`, and say so in `told`."""
    _gate_kernel[(1,)](
        asked, opened, version, told,
        STOPPED=STOPPED, STOOD_NS=STOOD_NS, WENT_ON=WENT_ON, NEWEST=NEWEST, PATIENCE_NS=PATIENCE_NS,
        num_warps=1,
    )  # fmt: skip
