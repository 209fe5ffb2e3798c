"""Truncation of a row of logits as a threshold, found without a sort, and what it leaves, written down.

Top-k, top-p of what top-k left, and min-p all keep the tokens above some score, so truncation is a threshold;
equal scores are kept or cut together. It is found in two steps. `narrow_kernel` reads a row once for the highest
score of each lane and the weight of all. The lanes' highest alone say how low the threshold can be at most; what
reaches that, as a rule some dozens of tokens, is copied out as *candidates* by a second pass. The threshold is
then bisected among them. Where there are too many, as in a flat distribution, it is bisected over the whole row, a
pass each.
"""

import triton
import triton.language as tl

from penstock.models.kernels.scores import NONE, inverse_heat, scores_at, sum_by_lane

STEPS = tl.constexpr(48)
"""Bisection steps at most: more than float32 has distinct midpoints in any range of scores."""
ROUGH_STEPS = tl.constexpr(10)
"""Of the bisection among the lanes' highest, which only has to come near."""


@triton.jit
def _above(
    logits, held, width, inverse, threshold, top, HELD: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """How many scores reach the threshold, and their weight relative to the highest."""
    if HELD:
        reached = held >= threshold
        count = tl.where(reached, 1.0, 0.0)
        weight = tl.where(reached, tl.exp(held - top), 0.0)
    else:
        count = tl.zeros([SIZE], tl.float32)
        weight = tl.zeros([SIZE], tl.float32)
        for base in range(0, width, SIZE):
            score = scores_at(logits, base + tl.arange(0, SIZE), width, inverse, NONE, True)
            reached = score >= threshold
            count += tl.where(reached, 1.0, 0.0)
            weight += tl.where(reached, tl.exp(score - top), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _bisect(
    logits, held, width, inverse, low, count_low, top, needed,
    BY_WEIGHT: tl.constexpr, HELD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The highest threshold that still leaves `needed` tokens, or that much weight; `low` leaves enough.

    Done as soon as a single token lies between the bounds; equal scores take until the bounds meet."""
    high = top + tl.abs(top) * 1e-6 + 1e-6
    count_high = 0.0
    steps = 0
    going = count_low > 1.5
    while going:
        middle = low + (high - low) * 0.5
        count, weight = _above(logits, held, width, inverse, middle, top, HELD, SIZE)
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
def _enough(tops, top, threshold, needed, by_number):
    """Whether the lanes' highest scores alone are so many, or of so much weight, above the threshold."""
    reached = tops >= threshold
    number = tl.sum(tl.where(reached, 1.0, 0.0), 0)
    weight = tl.sum(tl.where(reached, tl.exp(tops - top), 0.0), 0)
    return tl.where(by_number, number, weight) >= needed, number


@triton.jit
def _rough_threshold(tops, top, needed, by_number, SIZE: tl.constexpr):
    """A threshold that leaves enough; where the lanes' highest can't tell, one that leaves tokens in at most three
    quarters of the lanes, which are about 1.4 tokens a lane."""
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
def narrow_kernel(
    logits, sources, temperature, top_k, top_p, min_p, scores, ids, counts, weights, width, stride,
    SOURCES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Copy out the tokens of a row that truncation may keep, ascending, or say with a count of -1 that they are too
    many. `weights` is the weight of the whole row relative to its highest score."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if SOURCES:
        source = tl.load(sources + row).to(tl.int64)
    logits += source * stride
    inverse = inverse_heat(temperature, row)
    tops, sums, _ = sum_by_lane(logits, width, inverse, NONE, False, SIZE)
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - top), 0)
    tl.store(weights + row, total)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    by_number = (most > 0) & (most < width)
    needed = tl.where(by_number, most.to(tl.float32), tl.where(share < 1.0, share * total, 0.0))
    low = tl.full([], NONE, tl.float32)
    cuts = (needed > 0.0) | (least > 0.0)
    if (needed > 0.0) & (width > CANDIDATES):
        low = _rough_threshold(tops, top, needed, by_number, SIZE)
    if (least > 0.0) & (by_number == 0):  # not after top-k: top-p is a share of all that top-k left
        low = tl.maximum(low, top + tl.log(least))
        needed = tl.where(low > top + tl.log(least), needed, 0.0)
    number = tl.zeros([], tl.int32)
    if cuts | (width <= CANDIDATES):
        scores += row * CANDIDATES
        ids += row * CANDIDATES
        lane = tl.arange(0, BLOCK)
        weight = tl.zeros([BLOCK], tl.float32)
        score = scores_at(logits, lane, width, inverse, low, True)
        for base in range(0, width, BLOCK):
            following = scores_at(logits, base + BLOCK + lane, width, inverse, low, True)
            if tl.max(score, 0) > NONE:
                inside = score > NONE
                at = number + tl.cumsum(inside.to(tl.int32), 0) - 1
                fits = inside & (at < CANDIDATES)
                tl.store(scores + at, score, mask=fits)
                tl.store(ids + at, base + lane, mask=fits)
                number += tl.sum(inside.to(tl.int32), 0)
                weight += tl.where(inside, tl.exp(score - top), 0.0)
            score = following
        found = tl.where(by_number, number.to(tl.float32), tl.sum(weight, 0))
        number = tl.where((number <= CANDIDATES) & ((found >= needed) | (low <= NONE)), number, -1)
    else:
        number -= 1
    tl.store(counts + row, number)


@triton.jit
def threshold_of(
    logits, held, width, vocab, inverse, row, top_k, top_p, min_p, whole_weight,
    HELD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The score under which everything is cut. `whole_weight` is the weight of the uncut row. `HELD`: the row's
    scores are all in `held`."""
    if HELD:
        highest = held
        lowest = tl.where(held > NONE, held, -NONE)
    else:
        highest = tl.full([SIZE], 2 * NONE, tl.float32)
        lowest = tl.full([SIZE], -NONE, tl.float32)
        for base in range(0, width, SIZE):
            score = scores_at(logits, base + tl.arange(0, SIZE), width, inverse, NONE, True)
            highest = tl.maximum(highest, score)
            lowest = tl.minimum(lowest, tl.where(score > NONE, score, -NONE))
    top = tl.max(highest, 0)
    bottom = tl.min(lowest, 0)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = tl.full([], NONE, tl.float32)
    by_number = (most > 0) & (most < vocab)
    if by_number & (most < width):
        wanted = most.to(tl.float32)
        threshold = _bisect(
            logits, held, width, inverse, bottom, width * 1.0, top, wanted, False, HELD, SIZE
        )  # fmt: skip
    if share < 1.0:
        count, weight = _above(logits, held, width, inverse, threshold, top, HELD, SIZE)
        weight = tl.where(by_number, weight, whole_weight)
        start = tl.maximum(threshold, bottom)
        threshold = _bisect(
            logits, held, width, inverse, start, count, top, share * weight, True, HELD, SIZE
        )  # fmt: skip
    if least > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(least))
    return tl.maximum(threshold, bottom)


@triton.jit
def write_mask(
    logits, ids, width, inverse, threshold, num_kept, vocab, row, step, steps, arena, cursor, sizes, places,
    MAPPED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The kept ids of a row into the arena, ascending, or a bit for each token where that is shorter."""
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
