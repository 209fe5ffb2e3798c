"""From logits to tokens, for the whole batch at once.

In this order: logit bias, repetition and presence penalties, the ban on stop tokens before `min_tokens`
(`penstock.engines.embedded.shaping`), temperature, top-k, top-p of what top-k left, min-p. The logprob of a
token is that of the distribution it was drawn from, after all of it. At temperature 0 the most likely
token is taken, and its logprob is that of the shaped logits at temperature 1, without truncation.

A draw is a race: each token's weight divides an exponential number of its own, the smallest wins. Tiny
differences of the logits then change a draw with tiny probability, which inverting a cumulative
distribution would not give: that makes a seeded request reproducible in whatever batch it runs.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.noise import Words, exponentials, streams
from penstock.engines.embedded.sequence import Sequence
from penstock.engines.embedded.shaping import shape_logits
from penstock.engines.embedded.truncation import truncate
from penstock.sampling_masks import NO_WORDS

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token per row. `kept[row]` are the ids that truncation left, where the row's request records
    them: empty when nothing was cut."""

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
    """Whether the kernels of a GPU draw for it: they know temperature and truncation, no penalty, bias or
    early stop ban."""
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
    """A token of each row, with the row's probabilities.

    Two races: first among chunks of the vocabulary by their sums, then among the tokens of the winning
    chunk. That is the same distribution, and needs noise for a few hundred cells, not for a vocabulary."""
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
    """Draw among the candidates that top-k, top-p and min-p leave, and write down which they were."""
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
