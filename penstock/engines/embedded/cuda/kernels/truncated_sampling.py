"""Finds the score threshold of a truncated row of logits without a sort, and the mask of the tokens above it.

Top-k, top-p of what top-k left, and min-p all keep the tokens above some score, so truncation is a threshold;
equal scores are kept or cut together. It is found in two steps. `narrow_kernel` reads the row once. It adds
up the weight of all tokens, and notes the highest score of each lane and of each turn (the tokens that all
lanes read together). The highest scores of the lanes alone give a lower bound of the threshold. The tokens
above that bound, mostly some dozens, are the *candidates*: they are copied out, and only turns that hold one
are read again. Then the threshold is bisected among the candidates, and the token is drawn from them.

A flat distribution has too many candidates. There a few more passes bracket the threshold, until the tokens
between the two bounds are few enough to be candidates. The threshold is bisected among those, and the token
is drawn from the whole row. Only a large top-k is bisected over the whole row, with a pass for each step.
"""

import triton
import triton.language as tl

from penstock.engines.embedded.cuda.kernels.row_scores import (
    AT_ONCE,
    NONE,
    inverse_heat,
    scores_at,
    sum_by_lane,
)

STEPS = tl.constexpr(48)
"""Bisection steps at most: enough to tell float32 neighbours apart in any range that scores have."""
ROUGH_STEPS = tl.constexpr(10)
"""Steps of the bisection among the lanes' highest scores, which only has to come near."""
BRACKET_STEPS = tl.constexpr(16)
"""Passes at most until the bounds can't come closer: each leaves a quarter of the range."""

# What `narrow_kernel` stores in `counts`: the number of candidates, if they are all that may be kept; BAND minus
# that number, if all tokens above them are kept too; or UNKNOWN.
UNKNOWN = tl.constexpr(-1)
BAND = tl.constexpr(-2)
# The columns of `facts`, which `narrow_kernel` writes for each row.
FACTS = tl.constexpr(4)
TOP = tl.constexpr(0)
TOTAL = tl.constexpr(1)
"""Weight of the whole row, relative to its highest score as all weights are."""
LOW = tl.constexpr(2)
"""A lower bound of the threshold."""
ABOVE = tl.constexpr(3)
"""Weight above a band."""


@triton.jit
def _over(top):
    """Return a threshold that nothing reaches."""
    return top + tl.abs(top) * 1e-6 + 1e-6


@triton.jit
def _above(scores, width, inverse, threshold, top, HELD: tl.constexpr, SIZE: tl.constexpr):
    """Count the scores that reach the threshold, and add up their weight relative to the highest. With `HELD`,
    `scores` are the scores themselves; otherwise they point to the logits."""
    if HELD:
        reached = scores >= threshold
        count = tl.where(reached, 1.0, 0.0)
        weight = tl.where(reached, tl.exp(scores - top), 0.0)
    else:
        count = tl.zeros([SIZE], tl.float32)
        weight = tl.zeros([SIZE], tl.float32)
        for base in range(0, width, SIZE):
            score = scores_at(scores, base + tl.arange(0, SIZE), width, inverse, NONE, True)
            reached = score >= threshold
            count += tl.where(reached, 1.0, 0.0)
            weight += tl.where(reached, tl.exp(score - top), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _bisect(
    scores, width, inverse, low, count_low, top, needed,
    BY_WEIGHT: tl.constexpr, HELD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Find the highest threshold that still leaves `needed` tokens, or that much weight; `low` leaves enough.

    The search ends as soon as a single token lies between the bounds; with equal scores it takes until the
    bounds meet.
    """
    high = _over(top)
    count_high = 0.0
    steps = 0
    going = count_low > 1.5
    while going:
        middle = low + (high - low) * 0.5
        count, weight = _above(scores, width, inverse, middle, top, HELD, SIZE)
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
def _above_three(logits, width, inverse, first, second, third, top, SIZE: tl.constexpr):
    """Do what `_above` does for three thresholds in one pass."""
    nothing = tl.zeros([SIZE], tl.float32)
    count_1, count_2, count_3 = nothing, nothing, nothing
    weight_1, weight_2, weight_3 = nothing, nothing, nothing
    for base in tl.range(0, width, SIZE, num_stages=3):
        score = scores_at(logits, base + tl.arange(0, SIZE), width, inverse, NONE, True)
        weight = tl.exp(score - top)
        count_1 += tl.where(score >= first, 1.0, 0.0)
        count_2 += tl.where(score >= second, 1.0, 0.0)
        count_3 += tl.where(score >= third, 1.0, 0.0)
        weight_1 += tl.where(score >= first, weight, 0.0)
        weight_2 += tl.where(score >= second, weight, 0.0)
        weight_3 += tl.where(score >= third, weight, 0.0)
    count_1, count_2, count_3 = tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0)
    return count_1, count_2, count_3, tl.sum(weight_1, 0), tl.sum(weight_2, 0), tl.sum(weight_3, 0)


@triton.jit
def _bracket(
    logits, width, inverse, low, high, count_high, weight_high, top, needed, most, SIZE: tl.constexpr
):  # fmt: skip
    """Bound the highest threshold that leaves `needed` weight, with at most `most` tokens between the bounds.
    Returns the bounds, how many tokens lie between them, and the weight above. `low` leaves enough, or is the
    answer."""
    count_low, _ = _above(logits, width, inverse, low, top, False, SIZE)
    steps = 0
    going = count_low - count_high > most
    while going:
        quarter = (high - low) * 0.25
        first, second, third = low + quarter, low + 2 * quarter, high - quarter
        count_1, count_2, count_3, weight_1, weight_2, weight_3 = _above_three(
            logits, width, inverse, first, second, third, top, SIZE
        )
        met = (first <= low) | (third >= high)
        if weight_3 >= needed:
            low, count_low = third, count_3
        elif weight_2 >= needed:
            low, count_low = second, count_2
            high, count_high, weight_high = third, count_3, weight_3
        elif weight_1 >= needed:
            low, count_low = first, count_1
            high, count_high, weight_high = second, count_2, weight_2
        else:
            high, count_high, weight_high = first, count_1, weight_1
        steps += 1
        going = (met == 0) & (steps < BRACKET_STEPS) & (count_low - count_high > most)
    return low, high, count_low - count_high, weight_high


@triton.jit
def _enough(tops, top, threshold, needed, by_number):
    """Return whether the lanes' highest scores above the threshold are enough, by number or weight, and how many
    they are."""
    reached = tops >= threshold
    number = tl.sum(tl.where(reached, 1.0, 0.0), 0)
    weight = tl.sum(tl.where(reached, tl.exp(tops - top), 0.0), 0)
    return tl.where(by_number, number, weight) >= needed, number


@triton.jit
def _rough_threshold(tops, top, needed, by_number, SIZE: tl.constexpr):
    """Return a threshold that leaves enough. Where the lanes' highest scores can't tell, it leaves tokens in at
    most three quarters of the lanes, which means about 1.4 tokens a lane."""
    full = SIZE * 0.75
    bottom = tl.min(tl.where(tops > NONE, tops, top), 0)
    low, high = bottom, top
    for _ in range(ROUGH_STEPS):
        middle = low + (high - low) * 0.5
        enough, number = _enough(tops, top, middle, needed, by_number)
        goes_up = enough | (number > full)
        low = tl.where(goes_up, middle, low)
        high = tl.where(goes_up, high, middle)
    enough, _ = _enough(tops, top, low, needed, by_number)
    _, number = _enough(tops, top, bottom, needed, by_number)
    return tl.where(enough, low, tl.where(number > full, high, NONE))


@triton.jit
def _copy_out(
    logits, by_turn, width, inverse, low, high, top, scores, ids,
    SIZE: tl.constexpr, TURNS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Copy the tokens from `low` to below `high`, ascending, as far as there is room. Returns how many there
    are, and their weight."""
    number = tl.zeros([], tl.int32)
    weight = tl.zeros([SIZE], tl.float32)
    for turn in range(tl.cdiv(width, AT_ONCE * SIZE)):
        if tl.max(tl.where(tl.arange(0, TURNS) == turn, by_turn, NONE), 0) >= low:
            for part in range(AT_ONCE):
                place = (turn * AT_ONCE + part) * SIZE + tl.arange(0, SIZE)
                score = scores_at(logits, place, width, inverse, low, True)
                inside = (score > NONE) & (score < high)
                more = tl.sum(inside.to(tl.int32), 0)
                if more > 0:
                    at = number + tl.cumsum(inside.to(tl.int32), 0) - 1
                    fits = inside & (at < CANDIDATES)
                    tl.store(scores + at, score, mask=fits)
                    tl.store(ids + at, place, mask=fits)
                    number += more
                    weight += tl.where(inside, tl.exp(score - top), 0.0)
    return number, tl.sum(weight, 0)


@triton.jit
def narrow_kernel(
    logits, sources, temperature, top_k, top_p, min_p, scores, ids, counts, facts, width, stride,
    SOURCES: tl.constexpr, SIZE: tl.constexpr, TURNS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Copy out the tokens of a row among which the threshold lies, ascending."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if SOURCES:
        source = tl.load(sources + row).to(tl.int64)
    logits += source * stride
    scores += row * CANDIDATES
    ids += row * CANDIDATES
    inverse = inverse_heat(temperature, row)
    tops, sums, _counted, by_turn = sum_by_lane(logits, width, inverse, NONE, False, SIZE, TURNS)
    top = tl.max(tops, 0)
    above_all = _over(top)
    total = tl.sum(sums * tl.exp(tops - top), 0)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    by_number = (most > 0) & (most < width)
    needed = tl.where(by_number, most.to(tl.float32), tl.where(share < 1.0, share * total, 0.0))
    bound = tl.full([], NONE, tl.float32)
    if (least > 0.0) & (by_number == 0):  # not after top-k: top-p is a share of all that top-k left
        bound = top + tl.log(least)
    low = tl.full([], NONE, tl.float32)
    if (needed > 0.0) & (width > CANDIDATES):
        low = _rough_threshold(tops, top, needed, by_number, SIZE)
    low = tl.maximum(low, bound)
    above = tl.zeros([], tl.float32)
    number = tl.zeros([], tl.int32)
    cuts = (needed > 0.0) | (least > 0.0)  # else the row is drawn as if no row around it were cut
    if cuts:
        number, weight = _copy_out(
            logits, by_turn, width, inverse, low, above_all, top, scores, ids, SIZE, TURNS, CANDIDATES
        )
        has_enough = tl.where(by_number, number.to(tl.float32), weight) >= needed
        has_enough |= low <= bound
        if (number > CANDIDATES) | (has_enough == 0):
            if by_number:
                number = tl.full([], UNKNOWN, tl.int32)
            else:
                high = above_all
                count_high = tl.zeros([], tl.float32)
                if has_enough == 0:
                    high, count_high, above = low, number.to(tl.float32), weight
                    low = bound
                between = tl.zeros([], tl.float32)
                if needed > 0.0:
                    # Tokens below this weigh less, all together, than what may be cut.
                    low = tl.maximum(low, top + tl.log((1.0 - share) * total / width))
                    low, high, between, above = _bracket(
                        logits, width, inverse, low, high, count_high, above, top, needed, CANDIDATES, SIZE
                    )
                number = tl.full([], BAND, tl.int32)
                if (needed > 0.0) & (between <= CANDIDATES):
                    found, _ = _copy_out(
                        logits, by_turn, width, inverse, low, high, top, scores, ids, SIZE, TURNS, CANDIDATES
                    )
                    number -= found
    else:
        number = tl.full([], BAND, tl.int32)
    tl.store(counts + row, number)
    facts += row * FACTS
    tl.store(facts + TOP, top)
    tl.store(facts + TOTAL, total)
    tl.store(facts + LOW, low)
    tl.store(facts + ABOVE, above)


@triton.jit
def threshold_of_candidates(
    held, number, is_band, vocab, row, top_k, top_p, min_p, facts, SIZE: tl.constexpr
):
    """Return the score under which everything is cut, from the candidates of a row, which are in `held`."""
    facts += row * FACTS
    top, total = tl.load(facts + TOP), tl.load(facts + TOTAL)
    low, above = tl.load(facts + LOW), tl.load(facts + ABOVE)
    bottom = tl.min(tl.where(held > NONE, held, top), 0)
    threshold = tl.where(is_band, low, bottom)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    by_number = (most > 0) & (most < vocab)
    if by_number & (most < number):
        wanted = most.to(tl.float32)
        threshold = _bisect(held, number, 1.0, threshold, number * 1.0, top, wanted, False, True, SIZE)
    if share < 1.0:
        count, weight = _above(held, number, 1.0, threshold, top, True, SIZE)
        needed = share * tl.where(by_number, weight, total) - above
        threshold = _bisect(held, number, 1.0, threshold, count, top, needed, True, True, SIZE)
    if least > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(least))
    return threshold


@triton.jit
def threshold_of_row(logits, width, inverse, row, top_k, top_p, min_p, facts, SIZE: tl.constexpr):
    """Return the score under which everything is cut, from the whole row. Only a large top-k needs this."""
    lowest = tl.full([SIZE], -NONE, tl.float32)
    for base in range(0, width, SIZE):
        score = scores_at(logits, base + tl.arange(0, SIZE), width, inverse, NONE, True)
        lowest = tl.minimum(lowest, tl.where(score > NONE, score, -NONE))
    bottom = tl.min(lowest, 0)
    top = tl.load(facts + row * FACTS + TOP)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    wanted = most.to(tl.float32)
    threshold = _bisect(logits, width, inverse, bottom, width * 1.0, top, wanted, False, False, SIZE)
    if share < 1.0:
        count, weight = _above(logits, width, inverse, threshold, top, False, SIZE)
        wanted = share * weight
        threshold = _bisect(logits, width, inverse, threshold, count, top, wanted, True, False, SIZE)
    if least > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(least))
    return threshold


@triton.jit
def write_mask(
    logits, ids, width, inverse, threshold, num_kept, vocab, row, step, steps, arena, cursor, sizes, places,
    MAPPED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the kept ids of a row into the arena, ascending, or a bit for each token where that is shorter."""
    words = tl.cdiv(vocab, 32)
    as_ids = num_kept <= words
    if MAPPED:
        as_ids = num_kept > 0
    room = tl.where(as_ids, num_kept, words)
    place = tl.atomic_add(cursor, room)
    tl.store(sizes + row * steps + step, tl.where(as_ids, num_kept, -num_kept))
    tl.store(places + row * steps + step, place)
    arena += place
    lane = tl.arange(0, SIZE)
    before = tl.zeros([], tl.int32)
    for base in range(0, width, SIZE):
        inside = scores_at(logits, base + lane, width, inverse, threshold, True) > NONE
        if as_ids:
            names = base + lane
            if MAPPED:
                names = tl.load(ids + base + lane, mask=inside, other=0)
            number = tl.cumsum(inside.to(tl.int32), 0)
            tl.store(arena + before + number - 1, names, mask=inside)
            before += tl.sum(inside.to(tl.int32), 0)
        else:
            if not MAPPED:
                bits = tl.reshape(inside.to(tl.int32), [SIZE // 32, 32]) << tl.arange(0, 32)[None, :]
                word = base // 32 + tl.arange(0, SIZE // 32)
                tl.store(arena + word, tl.sum(bits, 1), mask=word < words)
