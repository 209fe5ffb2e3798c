"""Draws one token from each row of logits and gives its logprob, without a sort and without storing probabilities.

This is the Gumbel-max trick in two stages: it first draws a group of tokens by the group's total weight, then a
token within that group. The result has the distribution of the row, and random numbers are needed only for the
groups and for the tokens of one group. Lane i of the `LANES` lanes of a program reads tokens i, i + LANES, and so
on; these are its group. So lanes exchange nothing until the row has been read. The random numbers depend on the
seed and the position of the row alone. A truncated row is mostly drawn from the few candidates that
`truncated_sampling.py` finds.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.engines.embedded.cuda.kernels.row_scores import (
    NONE,
    inverse_heat,
    num_turns,
    scores_at,
    sum_by_lane,
)
from penstock.engines.embedded.cuda.kernels.truncated_sampling import (
    BAND,
    FACTS,
    UNKNOWN,
    narrow_kernel,
    threshold_of_candidates,
    threshold_of_row,
    write_mask,
)

LANES = 1024
CANDIDATES = 2048
"""The most tokens of a row that are copied out."""
PLACE_STRIDE = tl.constexpr(0x632BE59BD9B4E019)
WORD = 32


@triton.jit
def _gumbel(seed, cell):
    uniform = tl.maximum(tl.rand(seed, cell), 1e-10)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _first_of(logits, width, inverse, top, SIZE: tl.constexpr):
    first = tl.zeros([SIZE], tl.int32) + width
    for base in range(0, width, SIZE):
        place = base + tl.arange(0, SIZE)
        score = scores_at(logits, place, width, inverse, NONE, False)
        first = tl.minimum(first, tl.where(score == top, place, width))
    return tl.min(first, 0)


@triton.jit
def _draw_kernel(
    logits, sources, ids, counts, facts, temperature, seeds, places, top_k, top_p, min_p,
    records, step_at, arena, cursor, sizes, mask_places,
    tokens, logprobs, thresholds, kept, vocab, stride, steps,
    SOURCES: tl.constexpr, TRUNCATES: tl.constexpr, MAPPED: tl.constexpr, RECORDS: tl.constexpr,
    SIZE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Draw a token of each row. With `MAPPED`, a row is a list of candidates with these `ids`, and the threshold
    is found among them. Rows that keep more than their candidates are drawn by the next launch, which reads
    whole rows."""
    row = tl.program_id(0).to(tl.int64)
    width = vocab
    mine = True
    threshold = tl.full([], NONE, tl.float32)
    held = threshold
    if TRUNCATES:
        count = tl.load(counts + row)
        mine = (count >= 0) == MAPPED
    if MAPPED:
        width = tl.where(count >= 0, count, tl.maximum(-count + BAND, 0))
        held = scores_at(logits + row * stride, tl.arange(0, SIZE), width, 1.0, NONE, True)
        threshold = threshold_of_candidates(
            held, width, count <= BAND, vocab, row, top_k, top_p, min_p, facts, SIZE
        )
        tl.store(thresholds + row, threshold)
    if mine:
        source = row
        if SOURCES:
            source = tl.load(sources + row).to(tl.int64)
        inverse = inverse_heat(temperature, row)
        if MAPPED:  # candidates are scores already
            source = row
            inverse = 1.0
        data = logits + source * stride
        named = ids + row * stride
        greedy = tl.load(temperature + row) <= 0
        seed = tl.load(seeds + row) + tl.load(places + row) * PLACE_STRIDE
        lane = tl.arange(0, SIZE)
        if TRUNCATES and not MAPPED:
            threshold = tl.load(thresholds + row)
            if count == UNKNOWN:
                threshold = threshold_of_row(data, width, inverse, row, top_k, top_p, min_p, facts, SIZE)
                tl.store(thresholds + row, threshold)
        if MAPPED:
            names = tl.load(named + lane, mask=lane < width, other=0)
            score = tl.where(held >= threshold, held, 2 * NONE)
            number = tl.where(score > NONE, 1, 0)
            top = tl.max(score, 0)
            total = tl.sum(tl.exp(score - top), 0)
        else:
            tops, sums, number, _ = sum_by_lane(data, width, inverse, threshold, TRUNCATES, SIZE, 1)
            top = tl.max(tops, 0)
            total = tl.sum(sums * tl.exp(tops - top), 0)
            entry = tops + tl.log(tl.maximum(sums, 1e-30)) + _gumbel(seed, vocab + lane)
            group = tl.argmax(entry, 0)
            if greedy:
                group = _first_of(data, width, inverse, top, SIZE) % SIZE
            names = group + SIZE * tl.arange(0, TURNS)
            score = scores_at(data, names, width, inverse, threshold, TRUNCATES)
        noise = tl.where(greedy, 0.0, _gumbel(seed, names))
        winner = tl.argmax(tl.where(score > NONE, score + noise, 2 * NONE), 0)
        is_winner = tl.arange(0, TURNS) == winner
        chosen = tl.sum(tl.where(is_winner, score, 0.0), 0)
        tl.store(tokens + row, tl.sum(tl.where(is_winner, names, 0), 0).to(tl.int64))
        tl.store(logprobs + row, (chosen - top) - tl.log(total))
        if TRUNCATES:
            num_kept = tl.sum(number, 0)
            tl.store(kept + row, num_kept)
            if RECORDS:
                step = tl.load(step_at)
                cuts = (tl.load(records + row) != 0) & (num_kept < vocab)
                if cuts:
                    write_mask(
                        data, named, width, inverse, threshold, num_kept, vocab, row, step, steps,
                        arena, cursor, sizes, mask_places, MAPPED, SIZE,
                    )  # fmt: skip
                else:
                    tl.store(sizes + row * steps + step, 0)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Holds the truncation, a value per row: `top_k` 0, `top_p` 1 and `min_p` 0 leave a row whole."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class MaskArena:
    """Says where rows that record masks write their kept ids. Column `step` of the (rows, steps) tables holds
    the size and the offset of each mask: size n is n ids, size -n a bitmask with n tokens, and size 0 says
    that nothing was cut."""

    records: torch.Tensor
    step: torch.Tensor
    words: torch.Tensor
    cursor: torch.Tensor
    sizes: torch.Tensor
    places: torch.Tensor

    @staticmethod
    def words_per_row(vocab: int) -> int:
        """Return the most words that one row takes."""
        return max(-(-vocab // WORD), min(CANDIDATES, vocab))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Holds one token per row. Its kept ids are those whose logit over the temperature reaches the threshold."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    thresholds: torch.Tensor
    num_kept: torch.Tensor


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    places: torch.Tensor,
    *,
    sources: torch.Tensor | None = None,
    cuts: Cuts | None = None,
    arena: MaskArena | None = None,
) -> Sampled:
    """Draw from rows of (rows, vocabulary) logits: a token for each element of `temperature`, drawn from the row
    of the same number, or from row `sources[i]`.

    Temperature 0 takes the likeliest token, with its logprob at temperature 1; such a row must not be
    truncated. Nothing waits for the device, so the launches can be captured in a CUDA graph.
    """
    rows, vocab = len(temperature), logits.shape[1]
    device = logits.device
    result = Sampled(
        tokens=torch.empty(rows, dtype=torch.int64, device=device),
        logprobs=torch.empty(rows, device=device),
        thresholds=torch.empty(rows, device=device),
        num_kept=torch.empty(rows, dtype=torch.int32, device=device),
    )
    unused = result.num_kept
    flags = {"SOURCES": sources is not None, "TRUNCATES": cuts is not None, "RECORDS": arena is not None}
    limits = (unused,) * 3 if cuts is None else (cuts.top_k, cuts.top_p, cuts.min_p)
    recording: tuple[torch.Tensor, ...] = (unused,) * 6
    steps = 0
    if arena is not None:
        recording = (arena.records, arena.step, arena.words, arena.cursor, arena.sizes, arena.places)
        steps = arena.sizes.shape[1]
    given = unused if sources is None else sources
    results = (result.tokens, result.logprobs, result.thresholds, result.num_kept)
    counts = facts = unused
    if cuts is not None:
        scores = torch.empty(rows, CANDIDATES, device=device)
        ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)
        counts = torch.empty(rows, dtype=torch.int32, device=device)
        facts = torch.empty(rows, FACTS.value, device=device)
        narrow_kernel[(rows,)](
            logits, given, temperature, *limits, scores, ids, counts, facts, vocab, logits.stride(0),
            SOURCES=sources is not None, SIZE=LANES, TURNS=num_turns(vocab, LANES), CANDIDATES=CANDIDATES,
            num_warps=4,
        )  # fmt: skip
        _draw_kernel[(rows,)](
            scores, given, ids, counts, facts, temperature, seeds, places, *limits, *recording, *results,
            vocab, CANDIDATES, steps, MAPPED=True, SIZE=CANDIDATES, TURNS=CANDIDATES, num_warps=8, **flags,
        )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, given, unused, counts, facts, temperature, seeds, places, *limits, *recording, *results,
        vocab, logits.stride(0), steps, MAPPED=False, SIZE=LANES,
        TURNS=max(16, triton.next_power_of_2(triton.cdiv(vocab, LANES))), num_warps=4, **flags,
    )  # fmt: skip
    return result
