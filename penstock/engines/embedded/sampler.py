"""Turns logits into tokens, for the whole batch at once.

In this order: logit bias, repetition and presence penalties, the ban on stop tokens before `min_tokens`
(`shape_logits`), temperature, top-k, top-p of what top-k left, min-p. A token's logprob is that of the
distribution it was drawn from, after all of these. At temperature 0 the most likely token is taken, and its
logprob is that of the shaped logits at temperature 1, without truncation.

A draw is a race: each token has an exponentially distributed number, divided by its weight, and the smallest
wins. Tiny differences in the logits then change a draw with tiny probability, which inverting a cumulative
distribution would not give. This makes a seeded request reproducible in whatever batch it runs.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.sequence import Sequence
from penstock.records import SamplingParams
from penstock.records.sampling_masks import NO_WORDS

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Holds one token per row. `kept[row]` are the ids that truncation left, if the row's request records them;
    it is empty when nothing was cut."""

    tokens: list[int]
    logprobs: list[float]
    kept: dict[int, Ids] = field(default_factory=dict)


@torch.inference_mode()
def draw(logits: torch.Tensor, sequences: Rows[Sequence]) -> Drawn:
    """Draw the next token of each sequence from its row of `logits` (rows, vocabulary)."""
    params = [seq.request.sampling for seq in sequences]
    scores = shape_logits(logits.float(), sequences)
    if any(each.temperature not in (0.0, 1.0) for each in params):
        divisors = torch.tensor([each.temperature or 1.0 for each in params], device=scores.device)
        scores = scores / divisors[:, None]
    probs = torch.softmax(scores, dim=-1)
    greedy = [row for row, each in enumerate(params) if each.temperature == 0]
    cut = [row for row, each in enumerate(params) if each.temperature > 0 and each.truncates]
    if len(greedy) == len(params):
        chosen = probs.argmax(dim=-1)
    elif len(cut) == len(params):
        return _draw_truncated(probs, sequences)
    else:
        chosen = _race(probs, _streams(sequences))
        if greedy:
            chosen[greedy] = probs[greedy].argmax(dim=-1)
    drawn = Drawn(chosen.tolist(), probs.gather(1, chosen[:, None])[:, 0].log().tolist())
    if cut:
        part = _draw_truncated(probs[cut], [sequences[row] for row in cut])
        for at, row in enumerate(cut):
            drawn.tokens[row], drawn.logprobs[row] = part.tokens[at], part.logprobs[at]
            if at in part.kept:
                drawn.kept[row] = part.kept[at]
    return drawn


def draws_on_device(seq: Sequence) -> bool:
    """Return whether the GPU kernels can draw for a sequence: they know temperature and truncation, but no penalty,
    no bias and no early stop ban."""
    sampling = seq.request.sampling
    return not (
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or (sampling.min_tokens > 0 and sampling.stop_token_ids)
    )


def _streams(sequences: Rows[Sequence]) -> Words:
    seeds = np.array([seq.seed for seq in sequences], dtype=np.uint64)
    return streams(seeds, np.array([seq.num_output for seq in sequences], dtype=np.uint64))


def _race(probs: torch.Tensor, stream: Words) -> torch.Tensor:
    """Draw a token of each row, with the row's probabilities.

    There are two races: first among chunks of the vocabulary by their sums, then among the tokens of the
    winning chunk. That gives the same distribution, and needs noise for a few hundred cells instead of the
    whole vocabulary.
    """
    rows, vocab = probs.shape
    width = 1 << (vocab.bit_length() // 2)
    whole = vocab // width
    sums = probs.as_strided((rows, whole, width), (vocab, width, 1)).sum(dim=-1)
    if whole * width < vocab:
        sums = torch.cat([sums, probs[:, whole * width :].sum(dim=-1, keepdim=True)], dim=1)
    cells = np.arange(sums.shape[1] + width, dtype=np.uint64)
    noise = torch.from_numpy(exponentials(stream, cells)).to(probs.device)
    chunk = (noise[:, width:] / sums).argmin(dim=1, keepdim=True)
    ids = chunk * width + torch.arange(width, device=probs.device)
    if whole * width < vocab:
        weights = probs.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, 0.0)
    else:
        weights = probs.gather(1, ids)
    winner = (noise[:, :width] / weights).argmin(dim=1, keepdim=True)
    chosen: torch.Tensor = ids.gather(1, winner)[:, 0]
    return chosen


def _draw_truncated(probs: torch.Tensor, sequences: Rows[Sequence]) -> Drawn:
    """Draw among the candidates that top-k, top-p and min-p leave, and record them on request."""
    weights, ids = truncate(probs, [seq.request.sampling for seq in sequences])
    names = ids.cpu().numpy()
    noise = torch.from_numpy(exponentials(_streams(sequences), names.astype(np.uint64))).to(probs.device)
    place = (noise / weights).argmin(dim=1, keepdim=True)
    logprobs = (weights.gather(1, place) / weights.sum(dim=1, keepdim=True)).log()[:, 0]
    drawn = Drawn(ids.gather(1, place)[:, 0].tolist(), logprobs.tolist())
    recording = [row for row, seq in enumerate(sequences) if seq.request.record_sampling_mask]
    if recording:
        left = (weights > 0).cpu().numpy()
        for row in recording:
            kept = names[row][left[row]].astype(np.int32)
            drawn.kept[row] = np.sort(kept) if len(kept) < probs.shape[1] else NO_WORDS
    return drawn


def shape_logits(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Apply bias, penalties, and the ban on early stop tokens. Return a copy, or the logits themselves if no row
    needs any."""
    params = [seq.request.sampling for seq in sequences]
    biased = [row for row, each in enumerate(params) if each.logit_bias]
    repeating = [row for row, each in enumerate(params) if each.repetition_penalty != 1.0]
    present = [row for row, each in enumerate(params) if each.presence_penalty != 0.0]
    early = [
        row
        for row, seq in enumerate(sequences)
        if seq.num_output < params[row].min_tokens and params[row].stop_token_ids
    ]
    if not (biased or repeating or present or early):
        return logits
    logits = logits.clone()
    if biased:
        _add_bias(logits, sequences, biased)
    if repeating:
        seen = _seen([sequences[row].tokens for row in repeating], logits)
        penalties = _column([params[row].repetition_penalty for row in repeating], logits)
        part = logits[repeating]
        worse = torch.where(part < 0, part * penalties, part / penalties)
        logits[repeating] = torch.where(seen, worse, part)
    if present:
        seen = _seen([sequences[row].tokens[sequences[row].num_prompt :] for row in present], logits)
        logits[present] -= seen * _column([params[row].presence_penalty for row in present], logits)
    if early:
        pairs = [(row, token) for row in early for token in params[row].stop_token_ids]
        rows, tokens = zip(*pairs, strict=True)
        logits[list(rows), list(tokens)] = -torch.inf
    return logits


def _add_bias(logits: torch.Tensor, sequences: Rows[Sequence], biased: list[int]) -> None:
    rows, tokens, values = [], [], []
    for row in biased:
        for token, value in sequences[row].request.sampling.logit_bias.items():
            rows.append(row)
            tokens.append(token)
            values.append(value)
    logits[rows, tokens] += torch.tensor(values, device=logits.device)


def _seen(histories: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    """Return which tokens occur in each history, as (rows, vocabulary)."""
    vocab = like.shape[1]
    longest = max(len(history) for history in histories)
    padded = [history + [vocab] * (longest - len(history)) for history in histories]
    seen = torch.zeros(len(histories), vocab + 1, dtype=torch.bool, device=like.device)
    if longest:
        seen.scatter_(1, torch.tensor(padded, device=like.device), True)
    return seen[:, :vocab]


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype)[:, None]


FIRST_CANDIDATES = 64
"""How many of the likeliest tokens are examined first."""


def truncate(probs: torch.Tensor, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply top-k, top-p and min-p without sorting the vocabulary. Returns (weights, ids), the likeliest tokens
    of each row first, with weight 0 where the row's truncation cut the token. Weights are probabilities
    before renormalisation, in double precision.

    Top-p keeps the fewest tokens that hold its share of what top-k left, min-p those with at least its share
    of the likeliest token's probability. Few tokens are examined first, and more only when a row's truncation
    may reach past them.
    """
    device, vocab = probs.device, probs.shape[1]
    top_k = torch.tensor([min(each.top_k or vocab, vocab) for each in params], device=device)[:, None]
    top_p = torch.tensor([each.top_p for each in params], device=device, dtype=torch.float64)[:, None]
    min_p = torch.tensor([each.min_p for each in params], device=device, dtype=torch.float64)[:, None]
    count = min(vocab, max(FIRST_CANDIDATES, *(each.top_k for each in params)))
    while True:
        values, ids = probs.topk(count, dim=-1)
        weights = values.double().masked_fill_(torch.arange(count, device=device) >= top_k, 0.0)
        total = torch.where(top_k <= count, weights.sum(dim=-1, keepdim=True), 1.0)
        before = weights.cumsum(dim=-1) - weights
        cut = (before >= top_p * total) & (top_p < 1)
        cut |= weights < min_p * weights[:, :1]
        cut[:, 0] = False
        if count == vocab or bool((cut[:, -1:] | (top_k <= count)).all()):
            return weights.masked_fill_(cut, 0.0), ids
        count = min(vocab, count * 8)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def streams(seeds: Words, places: Words) -> Words:
    """Return one stream of random numbers per draw, from the request's seed and the position of the token to draw.

    Drawing by counter instead of from a running generator makes a token's draw the same whatever else is in the
    batch, however often the sequence was preempted, and in any order of requests.
    """
    return _scramble(_scramble(seeds) + (places + np.uint64(1)) * _GOLDEN)


def exponentials(stream: Words, cells: Words) -> npt.NDArray[np.float64]:
    """Return exponentially distributed numbers (rows, n), one per cell of each row's stream; never 0.

    `cells` is (n,) or (rows, n).
    """
    mixed = _scramble(stream[:, None] + (cells + np.uint64(1)) * _GOLDEN)
    uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    result: npt.NDArray[np.float64] = -np.log(uniform)
    return result


def _scramble(words: Words) -> Words:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014): every input bit affects every output bit."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
