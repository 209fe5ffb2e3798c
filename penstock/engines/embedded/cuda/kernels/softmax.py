"""Holds what the softmaxes of all attention kernels share."""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1e30)
"""The maximum of no scores: finite, so that differences never give NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, softcap):
    small = tl.exp(-2.0 * tl.abs(scores / softcap))
    tanh = (1.0 - small) / (1.0 + small)
    return softcap * tl.where(scores < 0, -tanh, tanh)


@triton.jit
def with_sink(sink, top, total, mixed, AXIS: tl.constexpr):
    """Add an attention sink to a softmax of powers of two: a score that takes its share and adds no value."""
    sink *= LOG2_E
    higher = tl.maximum(top, sink)
    shrink = tl.exp2(top - higher)
    return total * shrink + tl.exp2(sink - higher), mixed * tl.expand_dims(shrink, AXIS)
