"""Sample a token a row and give its logprob, without a sort and without writing probabilities.

Top-k, top-p of what top-k left, and min-p all keep the tokens above some score, so truncation is a threshold.
It is found by bisection over the scores, a pass over the row each; equal scores are kept or cut together.

The draw is a race in two stages: first among blocks of the vocabulary by their total weight, then among the
tokens of the winning block. That is the distribution itself, and needs a random number for each block
and for the tokens of one block, not for every token. Random numbers depend on the row's seed alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096
STEPS = tl.constexpr(48)
"""Bisection steps at most: more than float32 has distinct midpoints in any range of scores."""
NONE = tl.constexpr(-1e30)
"""Below every score: the threshold that cuts nothing."""


@triton.jit
def _scores(logits, base, width, inverse, SIZE: tl.constexpr):
    place = base + tl.arange(0, SIZE)
    raw = tl.load(logits + place, mask=place < width, other=-float("inf")).to(tl.float32)
    return tl.where(raw > NONE, raw * inverse, 2 * NONE)


@triton.jit
def _above(logits, width, inverse, threshold, top, SIZE: tl.constexpr):
    """How many scores reach the threshold, and their weight relative to the highest."""
    count = tl.zeros([SIZE], tl.float32)
    weight = tl.zeros([SIZE], tl.float32)
    for base in range(0, width, SIZE):
        score = _scores(logits, base, width, inverse, SIZE)
        reached = score >= threshold
        count += tl.where(reached, 1.0, 0.0)
        weight += tl.where(reached, tl.exp(score - top), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _bisect(logits, width, inverse, low, count_low, top, needed, BY_WEIGHT: tl.constexpr, SIZE: tl.constexpr):
    """The highest threshold that still leaves `needed` tokens, or that much weight; `low` leaves enough.

    Done as soon as a single token lies between the bounds; equal scores take until the bounds meet."""
    high = top + tl.abs(top) * 1e-6 + 1e-6
    count_high = 0.0
    steps = 0
    going = count_low > 1.5
    while going:
        middle = low + (high - low) * 0.5
        count, weight = _above(logits, width, inverse, middle, top, SIZE)
        found = count
        if BY_WEIGHT:
            found = weight
        enough = found >= needed
        met = (middle <= low) | (middle >= high)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count_low = tl.where(enough, count, count_low)
        count_high = tl.where(enough, count_high, count)
        steps += 1
        going = (met == 0) & (steps < STEPS) & (count_low - count_high > 1.5)
    return low


@triton.jit
def _gumbel(seed, cell):
    uniform = tl.maximum(tl.rand(seed, cell), 1e-10)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sample_kernel(
    logits, temperature, seeds, top_k, top_p, min_p, tokens, logprobs, thresholds, kept,
    width, stride, TRUNCATES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    heat = tl.load(temperature + row)
    greedy = heat <= 0
    inverse = 1.0 / tl.where(greedy, 1.0, heat)
    seed = tl.load(seeds + row)
    lane = tl.arange(0, SIZE)
    threshold = tl.full([], NONE, tl.float32)
    if TRUNCATES:
        highest = tl.full([SIZE], 2 * NONE, tl.float32)
        lowest = tl.full([SIZE], -NONE, tl.float32)
        for base in range(0, width, SIZE):
            score = _scores(logits, base, width, inverse, SIZE)
            highest = tl.maximum(highest, score)
            lowest = tl.minimum(lowest, tl.where(score > NONE, score, -NONE))
        top = tl.max(highest, 0)
        bottom = tl.min(lowest, 0)
        most = tl.load(top_k + row)
        share = tl.load(top_p + row)
        least = tl.load(min_p + row)
        if (most > 0) & (most < width):
            wanted = most.to(tl.float32)
            threshold = _bisect(logits, width, inverse, bottom, width * 1.0, top, wanted, False, SIZE)
        if share < 1.0:
            count, weight = _above(logits, width, inverse, threshold, top, SIZE)
            start = tl.maximum(threshold, bottom)
            threshold = _bisect(logits, width, inverse, start, count, top, share * weight, True, SIZE)
        if least > 0.0:
            threshold = tl.maximum(threshold, top + tl.log(least))
    best_score = tl.full([], 4 * NONE, tl.float32)
    best_base = tl.zeros([], tl.int32)
    running = tl.full([], NONE, tl.float32)
    total = tl.zeros([], tl.float32)
    number = tl.zeros([SIZE], tl.int32)
    for base in range(0, width, SIZE):
        score = _scores(logits, base, width, inverse, SIZE)
        inside = (score >= threshold) & (score > NONE)
        number += tl.where(inside, 1, 0)
        score = tl.where(inside, score, 2 * NONE)
        top_here = tl.maximum(tl.max(score, 0), NONE)
        weight_here = tl.sum(tl.exp(score - top_here), 0)
        entry = top_here + tl.log(tl.maximum(weight_here, 1e-30)) + _gumbel(seed, width + base // SIZE)
        entry = tl.where(greedy, top_here, entry)
        wins = entry > best_score
        best_score = tl.where(wins, entry, best_score)
        best_base = tl.where(wins, base, best_base)
        higher = tl.maximum(running, top_here)
        total = total * tl.exp(running - higher) + weight_here * tl.exp(top_here - higher)
        running = higher
    score = _scores(logits, best_base, width, inverse, SIZE)
    inside = (score >= threshold) & (score > NONE)
    noise = tl.where(greedy, 0.0, _gumbel(seed, best_base + lane))
    winner = tl.argmax(tl.where(inside, score + noise, 2 * NONE), 0)
    chosen = tl.sum(tl.where(lane == winner, score, 0.0), 0)
    tl.store(tokens + row, (best_base + winner).to(tl.int64))
    tl.store(logprobs + row, chosen - (running + tl.log(total)))
    tl.store(thresholds + row, threshold)
    tl.store(kept + row, tl.sum(number, 0))


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row. Its kept ids are those whose logit over the temperature reaches the threshold."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    thresholds: torch.Tensor
    num_kept: torch.Tensor


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> Sampled:
    """Draw from each row of (rows, vocabulary) logits; all arguments are (rows,) tensors.

    Temperature 0 takes the likeliest token, with its logprob at temperature 1; give it no truncation. `top_k`
    0, `top_p` 1 and `min_p` 0 leave a row whole; None leaves all rows whole and saves the passes.
    Nothing waits for the device, so the launch can be captured in a CUDA graph."""
    rows, width = logits.shape
    device = logits.device
    truncates = any(each is not None for each in (top_k, top_p, min_p))
    if truncates:
        top_k = torch.zeros(rows, dtype=torch.int32, device=device) if top_k is None else top_k
        top_p = torch.ones(rows, device=device) if top_p is None else top_p
        min_p = torch.zeros(rows, device=device) if min_p is None else min_p
    result = Sampled(
        tokens=torch.empty(rows, dtype=torch.int64, device=device),
        logprobs=torch.empty(rows, device=device),
        thresholds=torch.empty(rows, device=device),
        num_kept=torch.empty(rows, dtype=torch.int32, device=device),
    )
    _sample_kernel[(rows,)](
        logits, temperature, seeds,
        *((top_k, top_p, min_p) if truncates else (temperature,) * 3),
        result.tokens, result.logprobs, result.thresholds, result.num_kept,
        width, logits.stride(0), TRUNCATES=truncates, SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    return result
