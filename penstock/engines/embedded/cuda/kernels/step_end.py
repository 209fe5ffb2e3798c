"""Ends a decode step in two small kernels. One records the drawn tokens and advances every row. The other is the
gate: it makes the GPU wait while new weights are copied."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from penstock.engines.embedded.cuda.decode_buffers import DecodeBuffers

STOPS = 8
"""Stop tokens of a request that the device looks for; the host finds the others."""
STOPPED, WAITED_NS, RESUMED, GAVE_UP, NEWEST = range(5)
"""Numbers that the device writes for the host: the update it waits for, how long it waited for the last one, the
last update after which it continued, and one that it gave up on. From `NEWEST` on: for each policy, the version of
its newest tokens."""


@triton.jit
def _advance_kernel(
    drawn, logprobs, tokens, positions, ended, lengths, stops, policies, output_tokens, output_logprobs, step,
    versions, output_versions, newest, rows, window, stop_stride, num_policies,
    STOPS: tl.constexpr, SIZE: tl.constexpr, POLICIES: tl.constexpr,
):  # fmt: skip
    """Advance all rows in one program: they are few, and all need the step before it is incremented. Positions
    are the first row of `positions`."""
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
        policy = tl.load(policies + row, mask=real, other=0)
        live = tl.load(versions + policy, mask=real, other=0)
        tl.store(output_versions + row * window + column, live, mask=real)
        tl.store(lengths + row, tl.where(was_over == 0, length + 1, length), mask=real)
        for number in tl.static_range(STOPS):
            stop = tl.load(stops + number * stop_stride + row, mask=real, other=-1)
            over = tl.where(token == stop, 1, over)
        tl.store(ended + row, over, mask=real)
        tl.store(tokens + row, token, mask=real)
        tl.store(positions + row, tl.where(was_over == 0, place + 1, place), mask=real)
    slot = tl.arange(0, POLICIES)
    tl.store(newest + slot, tl.load(versions + slot, mask=slot < num_policies), mask=slot < num_policies)
    tl.store(step, column + 1)


def advance(
    drawn: torch.Tensor,
    logprobs: torch.Tensor,
    policies: torch.Tensor,
    versions: torch.Tensor,
    device_report: torch.Tensor,
    *,
    buffers: "DecodeBuffers",
    first_stop: int,
) -> None:
    """Write `drawn` into the next column of the outputs and make it the next input. The version of the weights is
    written with it: `versions` has that of each policy, and `policies` the policy of each row. A row that draws one
    of its stop tokens ends: `lengths` counts what was drawn up to then, and its position stays from then on."""
    rows = len(drawn)
    stops = buffers.ints[first_stop:]
    _advance_kernel[(1,)](
        drawn, logprobs, buffers.tokens, buffers.ints, buffers.ended, buffers.lengths, stops,
        policies, buffers.output_tokens, buffers.output_logprobs, buffers.step,
        versions, buffers.output_versions, device_report[NEWEST:], rows, buffers.output_tokens.shape[1],
        stops.stride(0), len(versions), STOPS=len(stops), SIZE=min(1024, triton.next_power_of_2(rows)),
        POLICIES=triton.next_power_of_2(len(versions)), num_warps=8,
    )  # fmt: skip


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _fence():  # what was stored before is seen by the host before what is stored after
    tl.inline_asm_elementwise(
        "{ fence.acq_rel.sys; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _gate_kernel(
    asked, opened, device_report, patience_ns,
    STOPPED: tl.constexpr, WAITED_NS: tl.constexpr, RESUMED: tl.constexpr, GAVE_UP: tl.constexpr,
):  # fmt: skip
    """Wait in one warp, so that all threads see the same. `asked` and `device_report` are in host memory."""
    ticket = tl.load(asked, volatile=True)
    seen = tl.load(opened, volatile=True)
    if seen < ticket:
        start = _nanoseconds()
        tl.store(device_report + STOPPED, ticket)
        _fence()
        stood = start - start
        while (seen < ticket) & (stood < patience_ns):
            seen = tl.load(opened, volatile=True)
            stood = _nanoseconds() - start
        if seen < ticket:
            tl.store(device_report + GAVE_UP, ticket)
        tl.store(device_report + WAITED_NS, stood)
        _fence()
        tl.store(device_report + RESUMED, ticket)


def stop_if_asked(
    asked: torch.Tensor, opened: torch.Tensor, device_report: torch.Tensor, patience_ns: int
) -> None:
    """Wait while `asked`, a number in host memory, is above `opened`, and report that in `device_report`. After
    `patience_ns` the device gives up, reports that too, and continues."""
    _gate_kernel[(1,)](
        asked, opened, device_report, patience_ns,
        STOPPED=STOPPED, WAITED_NS=WAITED_NS, RESUMED=RESUMED, GAVE_UP=GAVE_UP, num_warps=1,
    )  # fmt: skip
