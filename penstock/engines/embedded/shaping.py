"""Changes to the logits before anything is drawn: bias, penalties, and stop tokens that come too early."""

from collections.abc import Sequence as Rows

import torch

from penstock.engines.embedded.sequence import Sequence


def shape_logits(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """The logits that the distribution is made of. Changes a copy, and only if some row asks for it."""
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
    """(rows, vocabulary): which tokens occur in each history."""
    vocab = like.shape[1]
    longest = max(len(history) for history in histories)
    padded = [history + [vocab] * (longest - len(history)) for history in histories]
    seen = torch.zeros(len(histories), vocab + 1, dtype=torch.bool, device=like.device)
    if longest:
        seen.scatter_(1, torch.tensor(padded, device=like.device), True)
    return seen[:, :vocab]


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype)[:, None]
