"""From logits to tokens, for the whole batch at once.

In this order: logit bias, repetition and presence penalties, the ban on stop tokens before `min_tokens`
(`penstock.engines.embedded.shaping`), temperature, top-k, top-p of what top-k left, min-p. The logprob of a
token is that of the distribution it was drawn from, after all of it. At temperature 0 the most likely
token is taken, and its logprob is that of the shaped logits at temperature 1, without truncation.

A token is drawn by inverting the cumulative distribution at one uniform number per row
(`penstock.engines.embedded.noise`): cheaper than noise for a whole vocabulary, and reproducible.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.noise import uniforms
from penstock.engines.embedded.sequence import Sequence
from penstock.engines.embedded.shaping import shape_logits

CHUNK = 256
"""Tokens that are summed before anything is cumulated; see `_invert`."""
FIRST_CANDIDATES = 64
"""How many of the likeliest tokens truncation looks at first."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token per row. `kept[row]` are the ids that truncation left, where the row's request records
    them: empty when nothing was cut."""

    tokens: list[int]
    logprobs: list[float]
    kept: dict[int, npt.NDArray[np.int32]]


@torch.inference_mode()
def draw(logits: torch.Tensor, sequences: Rows[Sequence]) -> Drawn:
    """Draw the next token of each sequence from its row of `logits` (rows, vocabulary)."""
    scores = shape_logits(logits.float(), sequences)
    params = [seq.request.sampling for seq in sequences]
    temperatures = [each.temperature or 1.0 for each in params]
    if any(value != 1.0 for value in temperatures):
        scores = scores / torch.tensor(temperatures, device=scores.device)[:, None]
    noise = torch.from_numpy(_noise(sequences)).to(scores.device)
    greedy = [row for row, each in enumerate(params) if each.temperature == 0]
    cut = [row for row, each in enumerate(params) if each.truncates and each.temperature > 0]
    kept: dict[int, npt.NDArray[np.int32]] = {}
    logprobs_BV = torch.log_softmax(scores, dim=-1)
    if len(greedy) == len(params):
        chosen = logprobs_BV.argmax(dim=-1)
    elif len(cut) == len(params):
        chosen = torch.zeros(len(params), dtype=torch.long, device=scores.device)
    else:
        chosen = _invert(logprobs_BV.exp(), noise)
        if greedy:
            chosen[greedy] = logprobs_BV[greedy].argmax(dim=-1)
    logprobs = logprobs_BV.gather(1, chosen[:, None])[:, 0]
    if cut:
        whole = len(cut) == len(params)
        picked, values = _draw_truncated(
            logprobs_BV if whole else logprobs_BV[cut],
            noise if whole else noise[cut],
            [sequences[row] for row in cut],
            cut,
            kept,
        )
        chosen[cut] = picked
        logprobs[cut] = values
    return Drawn(chosen.tolist(), logprobs.tolist(), kept)


def _noise(sequences: Rows[Sequence]) -> npt.NDArray[np.float64]:
    seeds = np.array([seq.seed for seq in sequences], dtype=np.uint64)
    places = np.array([seq.num_output for seq in sequences], dtype=np.uint64)
    return uniforms(seeds, places)


def _invert(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative distribution passes each row's number.

    Two levels: sums of `CHUNK` tokens find the chunk, a cumulative sum finds the token in it. Only these
    short sums are cumulated, in double precision; a cumulative sum of a whole vocabulary in float would
    be slow and would lose the rare tokens."""
    rows, vocab = probs.shape
    whole = vocab // CHUNK
    chunks = probs.as_strided((rows, whole, CHUNK), (vocab, CHUNK, 1))
    sums = chunks.sum(dim=-1, dtype=torch.float64)
    if whole * CHUNK < vocab:
        rest = probs[:, whole * CHUNK :].sum(dim=-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], dim=1)
    cumulated = sums.cumsum(dim=-1)
    target = noise[:, None] * cumulated[:, -1:]
    chunk = (cumulated <= target).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    inside = target - (cumulated - sums).gather(1, chunk)
    ids = chunk * CHUNK + torch.arange(CHUNK, device=probs.device)
    members = probs.gather(1, ids.clamp(max=vocab - 1)).double().masked_fill_(ids >= vocab, 0.0)
    chosen: torch.Tensor = ids.gather(1, _pass(members, inside))[:, 0]
    return chosen


def _pass(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(rows, 1): the first column where the cumulative weight passes `target`; never one of weight 0."""
    cumulated = weights.cumsum(dim=-1)
    target = torch.minimum(target, cumulated[:, -1:] * (1 - 1e-12))
    return (cumulated <= target).sum(dim=-1, keepdim=True).clamp_(max=weights.shape[1] - 1)


def _draw_truncated(
    logprobs_BV: torch.Tensor,
    noise: torch.Tensor,
    sequences: list[Sequence],
    rows: list[int],
    kept: dict[int, npt.NDArray[np.int32]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the candidates that top-k, top-p and min-p leave; enters recorded masks into `kept`."""
    candidates, ids = _candidates(logprobs_BV, sequences)
    weights = candidates.double().exp().masked_fill_(candidates == -torch.inf, 0.0)
    place = _pass(weights, noise[:, None] * weights.sum(dim=-1, keepdim=True))
    total = weights.sum(dim=-1, keepdim=True).log()
    values = (candidates.double().gather(1, place) - total)[:, 0].float()
    recording = [at for at, seq in enumerate(sequences) if seq.request.record_sampling_mask]
    if recording:
        left = (candidates > -torch.inf).cpu().numpy()
        names = ids.to(torch.int32).cpu().numpy()
        vocab = logprobs_BV.shape[1]
        for at in recording:
            row = names[at][left[at]]
            kept[rows[at]] = np.sort(row) if len(row) < vocab else row[:0]
    return ids.gather(1, place)[:, 0], values


def _candidates(logprobs_BV: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens, most likely first, with -inf where a row's truncation cut them: (values, ids).

    Looks at few tokens first and at more only when they don't hold all that must be kept."""
    params = [seq.request.sampling for seq in sequences]
    device, vocab = logprobs_BV.device, logprobs_BV.shape[1]
    top_k = torch.tensor([min(each.top_k or vocab, vocab) for each in params], device=device)[:, None]
    top_p = torch.tensor([each.top_p for each in params], device=device, dtype=torch.float64)[:, None]
    min_p = torch.tensor([each.min_p for each in params], device=device, dtype=torch.float64)[:, None]
    count = min(vocab, max(FIRST_CANDIDATES, *(each.top_k for each in params)))
    while True:
        values, ids = logprobs_BV.topk(count, dim=-1)
        weights = values.double().exp().masked_fill_(torch.arange(count, device=device) >= top_k, 0.0)
        # Top-p is a share of what top-k left; without top-k, of all there is.
        total = torch.where(top_k <= count, weights.sum(dim=-1, keepdim=True), 1.0)
        before = weights.cumsum(dim=-1) - weights
        cut = (before >= top_p * total) & (top_p < 1)
        cut |= weights < min_p * weights[:, :1]
        cut |= weights == 0
        cut[:, 0] = False
        if count == vocab or bool((cut[:, -1:] | (top_k <= count)).all()):
            return values.masked_fill(cut, -torch.inf), ids
        count = min(vocab, count * 8)
