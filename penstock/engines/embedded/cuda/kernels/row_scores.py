"""Reads the scores (logits over the temperature) of one row, and sums their weights for each lane of a program."""

import triton
import triton.language as tl

NONE = tl.constexpr(-1e30)
"""Below every score: the threshold that cuts nothing."""
AT_ONCE = tl.constexpr(4)
"""Tokens of a lane that are read together: their highest score is found first, so that the sum is rescaled once for
all of them."""


def num_turns(width: int, lanes: int) -> int:
    """Return the size of a table with room for every turn that `sum_by_lane` takes over a row."""
    return int(max(2, triton.next_power_of_2(triton.cdiv(width, AT_ONCE.value * lanes))))


@triton.jit
def inverse_heat(temperature, row):
    heat = tl.load(temperature + row)
    return 1.0 / tl.where(heat <= 0, 1.0, heat)


@triton.jit
def scores_at(logits, places, width, inverse, threshold, TRUNCATES: tl.constexpr):
    """Return the scores of these tokens. A token that is cut or does not exist gets a score far below all
    others."""
    raw = tl.load(logits + places, mask=places < width, other=-float("inf")).to(tl.float32)
    score = tl.maximum(raw * inverse, 2 * NONE)
    if TRUNCATES:
        score = tl.where((raw > NONE) & (score >= threshold), score, 2 * NONE)
    return score


@triton.jit
def sum_by_lane(
    logits, width, inverse, threshold, TRUNCATES: tl.constexpr, SIZE: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Return, over the tokens that each lane reads, the highest score, the weight relative to it, and how many are
    not cut. With `TURNS` also return the highest score that all lanes see in each turn of `AT_ONCE` tokens."""
    lane = tl.arange(0, SIZE)
    tops = tl.full([SIZE], NONE, tl.float32)
    sums = tl.zeros([SIZE], tl.float32)
    number = tl.zeros([SIZE], tl.int32)
    by_turn = tl.full([TURNS], NONE, tl.float32)
    for base in tl.range(0, width, AT_ONCE * SIZE, num_stages=3):
        place = base + lane
        a = scores_at(logits, place, width, inverse, threshold, TRUNCATES)
        b = scores_at(logits, place + SIZE, width, inverse, threshold, TRUNCATES)
        c = scores_at(logits, place + 2 * SIZE, width, inverse, threshold, TRUNCATES)
        d = scores_at(logits, place + 3 * SIZE, width, inverse, threshold, TRUNCATES)
        highest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        if TURNS > 1:
            by_turn = tl.where(tl.arange(0, TURNS) == base // (AT_ONCE * SIZE), tl.max(highest, 0), by_turn)
        higher = tl.maximum(highest, tops)
        weight = tl.exp(a - higher) + tl.exp(b - higher) + tl.exp(c - higher) + tl.exp(d - higher)
        sums = sums * tl.exp(tops - higher) + weight
        tops = higher
        if TRUNCATES:
            number += (a > NONE).to(tl.int32) + (b > NONE).to(tl.int32)
            number += (c > NONE).to(tl.int32) + (d > NONE).to(tl.int32)
    return tops, sums, number, by_turn
