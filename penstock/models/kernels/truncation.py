"""Truncation of a row of logits as a threshold, found without a sort, and what it leaves, written down.

Top-k, top-p of what top-k left, and min-p all keep the tokens above some score, so truncation is a threshold;
equal scores are kept or cut together. It is found in two steps. `narrow_kernel` reads a row and counts what
lies above each of a few thresholds; that brackets the one looked for, and the tokens above the bracket, as a
rule some hundred, are copied out as *candidates*. The threshold is then bisected among them alone. Where there
are too many candidates, as in a flat distribution, it is bisected over the whole row, a pass each.
"""

import triton
import triton.language as tl

NARROW_BLOCK = 1024
STEPS = tl.constexpr(48)
"""Bisection steps at most: more than float32 has distinct midpoints in any range of scores."""
NONE = tl.constexpr(-1e30)
"""Below every score: the threshold that cuts nothing."""
LADDER = tl.constexpr(16)
"""Thresholds that a row is held against at once: 1 to 16 nats below its highest score."""


@triton.jit
def inverse_heat(temperature, row):
    heat = tl.load(temperature + row)
    return 1.0 / tl.where(heat <= 0, 1.0, heat)


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
def narrow_kernel(
    logits, sources, temperature, top_k, top_p, min_p, scores, ids, counts, weights, width, stride,
    SOURCES: tl.constexpr, SIZE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Copy out the tokens of a row that truncation may keep, or say with a count of -1 that they are too many.

    `counts` must come as zeros. `weights` is the weight of the whole row relative to its highest score."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if SOURCES:
        source = tl.load(sources + row).to(tl.int64)
    logits += source * stride
    inverse = inverse_heat(temperature, row)
    highest = tl.full([SIZE], 2 * NONE, tl.float32)
    for base in range(0, width, SIZE):
        highest = tl.maximum(highest, _scores(logits, base, width, inverse, SIZE))
    top = tl.max(highest, 0)
    rungs = top - 1.0 - tl.arange(0, LADDER).to(tl.float32)
    rungs = tl.where(tl.arange(0, LADDER) == LADDER - 1, NONE, rungs)  # the last rung is under everything
    count = tl.zeros([LADDER, SIZE], tl.float32)
    weight = tl.zeros([LADDER, SIZE], tl.float32)
    for base in range(0, width, SIZE):
        score = _scores(logits, base, width, inverse, SIZE)
        reached = score[None, :] >= rungs[:, None]
        count += tl.where(reached, 1.0, 0.0)
        weight += tl.where(reached, tl.exp(score - top)[None, :], 0.0)
    counts_above, weights_above = tl.sum(count, 1), tl.sum(weight, 1)
    total = tl.max(weights_above, 0)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    low = tl.full([], NONE, tl.float32)
    if (most > 0) & (most < width):
        low = tl.max(tl.where(counts_above >= most.to(tl.float32), rungs, 2 * NONE), 0)
    else:
        if share < 1.0:
            low = tl.max(tl.where(weights_above >= share * total, rungs, 2 * NONE), 0)
        if least > 0.0:  # not after top-k: top-p is a share of all that top-k left
            low = tl.maximum(low, top + tl.log(least))
    bound = tl.min(tl.where(rungs <= low, counts_above, 1e30), 0)  # of the next rung at or under it
    tl.store(weights + row, total)
    cursor = counts + row
    if bound > CANDIDATES:
        tl.store(cursor, -1)
    else:
        for base in range(0, width, SIZE):
            score = _scores(logits, base, width, inverse, SIZE)
            inside = (score >= low) & (score > NONE)
            if tl.max(score, 0) >= low:
                at = row * CANDIDATES + tl.atomic_add(cursor + tl.zeros([SIZE], tl.int32), 1, mask=inside)
                tl.store(scores + at, score, mask=inside)
                tl.store(ids + at, base + tl.arange(0, SIZE), mask=inside)


@triton.jit
def threshold_of(logits, width, vocab, inverse, row, top_k, top_p, min_p, whole_weight, SIZE: tl.constexpr):
    """The score under which everything is cut. `whole_weight` is the weight of the uncut row."""
    highest = tl.full([SIZE], 2 * NONE, tl.float32)
    lowest = tl.full([SIZE], -NONE, tl.float32)
    for base in range(0, width, SIZE):
        score = _scores(logits, base, width, inverse, SIZE)
        highest = tl.maximum(highest, score)
        lowest = tl.minimum(lowest, tl.where(score > NONE, score, -NONE))
    top = tl.max(highest, 0)
    bottom = tl.min(lowest, 0)
    most, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = tl.full([], NONE, tl.float32)
    by_number = (most > 0) & (most < vocab)
    if by_number & (most < width):
        wanted = most.to(tl.float32)
        threshold = _bisect(logits, width, inverse, bottom, width * 1.0, top, wanted, False, SIZE)
    if share < 1.0:
        count, weight = _above(logits, width, inverse, threshold, top, SIZE)
        weight = tl.where(by_number, weight, whole_weight)
        start = tl.maximum(threshold, bottom)
        threshold = _bisect(logits, width, inverse, start, count, top, share * weight, True, SIZE)
    if least > 0.0:
        threshold = tl.maximum(threshold, top + tl.log(least))
    return tl.maximum(threshold, bottom)


@triton.jit
def write_mask(
    logits, ids, width, inverse, threshold, num_kept, vocab, row, step, steps, arena, cursor, sizes, places,
    MAPPED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The kept ids of a row into the arena: as ids, or as a bit for each token where that is shorter."""
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
        score = _scores(logits, base, width, inverse, SIZE)
        inside = (score >= threshold) & (score > NONE)
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
