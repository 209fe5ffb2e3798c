"""Computes the log-normaliser and entropy of each row of logits, and the gradient of the logits, with one Triton
kernel each.

The chunked head (`trainer.forward.logprob_head`) makes a chunk of logits with one matmul. What remains is
memory-bound, so each kernel reads the chunk once. The first keeps an online softmax (running maximum and
sums) per lane, and combines the lanes at the end. A logit of minus infinity marks an id that truncated
sampling cut: it gets no probability and no gradient.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
FLOOR = tl.constexpr(-1e30)
"""Stands for "no value yet" in a running maximum: finite, so that differences never give NaN."""
CUT = tl.constexpr(-2e30)
"""Stands for an id that was cut: so far below any maximum that its weight is zero."""


@triton.jit
def _shaped(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    value = raw.to(tl.float32) * scale
    if HAS_SOFTCAP:
        # tanh through exp of a negative number, which cannot overflow
        small = tl.exp(-2.0 * tl.abs(value / softcap))
        tanh = (1.0 - small) / (1.0 + small)
        value = softcap * tl.where(value < 0, -tanh, tanh)
    return value


@triton.jit
def _statistics_kernel(
    logits,
    temperature,
    lse,
    entropy,
    width,
    stride,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.load(temperature + row)
    lane = tl.arange(0, SIZE)
    top = tl.full([SIZE], FLOOR, tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    weighted = tl.zeros([SIZE], tl.float32)
    for start in range(0, width, SIZE):
        inside = start + lane < width
        raw = tl.load(logits + row * stride + start + lane, mask=inside, other=-float("inf"))
        value = _shaped(raw, scale, softcap, HAS_SOFTCAP) * inverse
        value = tl.where(raw == -float("inf"), CUT, value)
        higher = tl.maximum(top, value)
        shrink = tl.exp(top - higher)
        weight = tl.exp(value - higher)
        total = total * shrink + weight
        weighted = weighted * shrink + weight * value
        top = higher
    highest = tl.max(top, 0)
    shrink = tl.exp(top - highest)
    all_total = tl.sum(total * shrink, 0)
    all_weighted = tl.sum(weighted * shrink, 0)
    log_total = highest + tl.log(all_total)
    tl.store(lse + row, log_total)
    tl.store(entropy + row, log_total - all_weighted / all_total)


@triton.jit
def _gradient_kernel(
    logits, targets, temperature, lse, entropy, grad_logprobs, grad_entropy, grad,
    width, stride, grad_stride, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = lane < width
    inverse = 1.0 / tl.load(temperature + row)
    raw = tl.load(logits + row * stride + lane, mask=inside, other=-float("inf"))
    shaped = _shaped(raw, scale, softcap, HAS_SOFTCAP)
    cut = raw == -float("inf")
    logprob = tl.where(cut, -float("inf"), shaped * inverse - tl.load(lse + row))
    probability = tl.exp(logprob)
    from_logprob = tl.load(grad_logprobs + row)
    result = -probability * from_logprob
    if HAS_ENTROPY:
        surprise = tl.where(cut, 0.0, logprob + tl.load(entropy + row))
        result -= probability * surprise * tl.load(grad_entropy + row)
    result += tl.where(lane == tl.load(targets + row), from_logprob, 0.0)
    result *= inverse * scale
    if HAS_SOFTCAP:
        share = shaped / softcap
        result *= 1.0 - share * share
    tl.store(grad + row * grad_stride + lane, result.to(grad.dtype.element_ty), mask=inside)


def statistics(
    logits: torch.Tensor, temperature: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log of the normaliser and the entropy, (rows,) each, of the raw (rows, vocabulary) logits."""
    rows, width = logits.shape
    lse, entropy = (torch.empty(rows, device=logits.device) for _ in range(2))
    if rows:
        _statistics_kernel[(rows,)](
            logits, temperature, lse, entropy, width, logits.stride(0), scale, softcap or 1.0,
            HAS_SOFTCAP=softcap is not None, SIZE=BLOCK, num_warps=8,
        )  # fmt: skip
    return lse, entropy


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the gradient of the raw logits, in `dtype`."""
    rows, width = logits.shape
    grad = torch.empty(rows, width, dtype=dtype, device=logits.device)
    if rows:
        _gradient_kernel[(rows, triton.cdiv(width, BLOCK))](
            logits, targets, temperature, lse, entropy, grad_logprobs.contiguous(),
            grad_logprobs if grad_entropy is None else grad_entropy.contiguous(), grad,
            width, logits.stride(0), grad.stride(0), scale, softcap or 1.0,
            HAS_SOFTCAP=softcap is not None, HAS_ENTROPY=grad_entropy is not None, SIZE=BLOCK, num_warps=8,
        )  # fmt: skip
    return grad
