"""Lays out the tokens of one forward pass as rectangles of queries over the cached keys of their sequences.

All tokens of a pass are one row for the model. For attention they are regrouped into a few padded rectangles,
so that a whole batch of decoding sequences, or of equally long prompts, takes a handful of tensor operations
and never a Python loop over sequences.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.scheduler import Span

Longs = npt.NDArray[np.int64]

SPLIT_ABOVE = 4096
"""Padded keys of one rectangle above which sequences of different lengths are kept apart."""


@dataclass(slots=True)
class Rectangle:
    """Holds `rows` sequences with up to `width` queries each, over up to `num_keys` cached keys."""

    start: int
    """The first token of the pass that belongs here; tokens lie row after row, without padding."""
    num_tokens: int
    rows: int
    width: int
    num_keys: int
    table: torch.Tensor
    """(rows * blocks,): the blocks of each row's keys, padded with any block."""
    query_positions: torch.Tensor
    """(rows, width): position of each query in its sequence; padding repeats the row's last query."""
    gather: torch.Tensor | None = None
    """(rows * width,): token of each query, from `start`; None when no row is padded."""
    scatter: torch.Tensor | None = None
    """(num_tokens,): query of each token; None when no row is padded."""
    biases: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Return 0 where a query may attend and -inf elsewhere: (rows, 1, groups * width, num_keys), or one row
        of queries for all groups when `width` is 1. It is made once a pass, not once a layer."""
        if self.width == 1:
            groups = 1
        known = self.biases.get((window, groups))
        if known is not None:
            return known
        keys = torch.arange(self.num_keys, device=self.table.device)
        ahead = self.query_positions[:, None, :, None] - keys
        hidden = ahead < 0 if window is None else (ahead < 0) | (ahead >= window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
        self.biases[window, groups] = bias = bias.repeat(1, 1, groups, 1) if groups > 1 else bias
        return bias


@dataclass(slots=True)
class Layout:
    """Holds one pass as tensors."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    """(tokens,): where each token's key and value go, in tokens from the start of the cache."""
    rectangles: list[Rectangle]
    last: Longs
    """For each span, the token whose logits continue it."""
    owners: Longs
    """For each token, the number of its span."""


def lay_out(spans: list[Span], block_size: int, device: torch.device) -> Layout:
    """Build the tensors of a pass. Tokens are ordered by rectangle, and within it by row."""
    ids: list[int] = []
    positions: list[Longs] = []
    slots: list[Longs] = []
    last = np.empty(len(spans), dtype=np.int64)
    order: list[int] = []
    rectangles: list[Rectangle] = []
    for members in _group(spans, block_size):
        start = len(ids)
        order += members
        for number in members:
            seq, first, count = spans[number]
            if count == 1:
                ids.append(seq.tokens[first])
            else:
                ids.extend(seq.tokens[first : first + count])
            last[number] = len(ids) - 1
        rectangle, places, where = _rectangle(
            [spans[number] for number in members], start, block_size, device
        )
        rectangles.append(rectangle)
        positions.append(places)
        slots.append(where)
    return Layout(
        input_ids=torch.tensor([ids], device=device),
        positions=_join(positions, device)[None],
        slots=_join(slots, device),
        rectangles=rectangles,
        last=last,
        owners=np.repeat(order, [spans[number][2] for number in order]),
    )


def _group(spans: list[Span], block_size: int) -> list[list[int]]:
    """Group the numbers of spans into rectangles of similar numbers of queries and keys. Spans of one query with
    few keys in all are one rectangle."""
    if all(count == 1 for _, _, count in spans):
        longest = max(first for _, first, _ in spans)
        if longest * len(spans) <= SPLIT_ABOVE:
            return [list(range(len(spans)))]
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (_, first, count) in enumerate(spans):
        key = ((count - 1).bit_length(), ((first + count - 1) // block_size).bit_length())
        groups.setdefault(key, []).append(number)
    return [groups[key] for key in sorted(groups)]


def _rectangle(
    members: list[Span], start: int, block_size: int, device: torch.device
) -> tuple[Rectangle, Longs, Longs]:
    """Return a rectangle, and for each of its tokens its position and its slot in the cache."""
    rows = len(members)
    firsts = np.array([first for _, first, _ in members])
    counts = np.array([count for _, _, count in members])
    width = int(counts.max())
    num_blocks = -(-int((firsts + counts).max()) // block_size)
    table = np.zeros((rows, num_blocks), dtype=np.int64)
    for row, (seq, _, _) in enumerate(members):
        blocks = seq.blocks[:num_blocks]
        table[row, : len(blocks)] = blocks
    columns = np.minimum(np.arange(width), counts[:, None] - 1)
    queries = firsts[:, None] + columns
    num_tokens = int(counts.sum())
    rectangle = Rectangle(
        start=start,
        num_tokens=num_tokens,
        rows=rows,
        width=width,
        num_keys=num_blocks * block_size,
        table=torch.from_numpy(table.reshape(-1)).to(device),
        query_positions=torch.from_numpy(queries).to(device),
    )
    positions = queries.reshape(-1)
    row_of = np.repeat(np.arange(rows), width)
    if num_tokens != rows * width:
        offsets = np.cumsum(counts) - counts
        rectangle.gather = torch.from_numpy((offsets[:, None] + columns).reshape(-1)).to(device)
        inside = np.flatnonzero(np.arange(width) < counts[:, None])
        rectangle.scatter = torch.from_numpy(inside).to(device)
        positions, row_of = positions[inside], row_of[inside]
    slots = table[row_of, positions // block_size] * block_size + positions % block_size
    return rectangle, positions, slots


def _join(parts: list[Longs], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(device)
