"""Where the tokens of one forward pass lie: rows of queries over the cached keys of their sequences.

All tokens of a pass are one row for the model. For attention they are regrouped into a few padded
rectangles, so that a whole batch of decoding sequences, or of equally long prompts, is a handful of
tensor operations and never a Python loop over sequences.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.scheduler import Batch
from penstock.engines.embedded.sequence import Sequence

Longs = npt.NDArray[np.int64]


@dataclass(slots=True)
class Rectangle:
    """`rows` sequences with up to `width` queries each, over up to `num_keys` cached keys."""

    start: int
    """The first token of the pass that belongs here; tokens lie row after row, without padding."""
    num_tokens: int
    rows: int
    width: int
    table: torch.Tensor
    """(rows * blocks,): the blocks of each row's keys, padded with any block."""
    query_positions: torch.Tensor
    """(rows, width): place of each query in its sequence; padding repeats the row's last query."""
    num_keys: int
    gather: torch.Tensor | None = None
    """(rows * width,): token of each query, from `start`; None when no row is padded."""
    scatter: torch.Tensor | None = None
    """(num_tokens,): query of each token; None when no row is padded."""
    biases: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """(rows, 1, groups * width, num_keys): 0 where a query may look, -inf elsewhere. Made once a pass."""
        known = self.biases.get((window, groups))
        if known is not None:
            return known
        keys = torch.arange(self.num_keys, device=self.table.device)
        ahead = self.query_positions[:, :, None] - keys
        hidden = ahead < 0 if window is None else (ahead < 0) | (ahead >= window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
        bias = bias[:, None].repeat(1, 1, groups, 1) if groups > 1 else bias[:, None]
        self.biases[window, groups] = bias
        return bias


@dataclass(slots=True)
class Layout:
    """One pass as tensors."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    """(tokens,): where each token's key and value go, in tokens from the start of the cache."""
    rectangles: list[Rectangle]
    last: Longs
    """For each span of the batch, the token whose logits continue it."""


def lay_out(batch: Batch, block_size: int, device: torch.device) -> Layout:
    """The tensors of a batch. Spans are ordered so that each rectangle's tokens are adjacent."""
    order = sorted(range(len(batch.spans)), key=lambda number: _bucket(batch.spans[number][2]))
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last = np.zeros(len(order), dtype=np.int64)
    rectangles: list[Rectangle] = []
    begin = 0
    for at, number in enumerate(order):
        seq, start, count = batch.spans[number]
        ids.extend(seq.tokens[start : start + count])
        positions.extend(range(start, start + count))
        blocks = seq.blocks
        slots.extend(
            blocks[place // block_size] * block_size + place % block_size
            for place in range(start, start + count)
        )
        last[number] = len(ids) - 1
        bucket = _bucket(count)
        if at + 1 == len(order) or _bucket(batch.spans[order[at + 1]][2]) != bucket:
            members = [batch.spans[each] for each in order[begin : at + 1]]
            done = rectangles[-1].start + rectangles[-1].num_tokens if rectangles else 0
            rectangles.append(_rectangle(members, done, block_size, device))
            begin = at + 1
    return Layout(
        input_ids=torch.tensor([ids], device=device),
        positions=torch.tensor([positions], device=device),
        slots=torch.tensor(slots, device=device),
        rectangles=rectangles,
        last=last,
    )


def _bucket(count: int) -> int:
    """Spans whose counts share a power of two share a rectangle."""
    return (count - 1).bit_length()


def _rectangle(
    members: list[tuple[Sequence, int, int]], start: int, block_size: int, device: torch.device
) -> Rectangle:
    rows = len(members)
    counts = np.array([count for _, _, count in members])
    firsts = np.array([first for _, first, _ in members])
    width = int(counts.max())
    num_blocks = -(-int((firsts + counts).max()) // block_size)
    table = np.zeros((rows, num_blocks), dtype=np.int64)
    for row, (seq, first, count) in enumerate(members):
        used = -(-(first + count) // block_size)
        table[row, :used] = seq.blocks[:used]
    columns = np.minimum(np.arange(width), counts[:, None] - 1)
    rectangle = Rectangle(
        start=start,
        num_tokens=int(counts.sum()),
        rows=rows,
        width=width,
        table=torch.from_numpy(table.reshape(-1)).to(device),
        query_positions=torch.from_numpy(firsts[:, None] + columns).to(device),
        num_keys=num_blocks * block_size,
    )
    if (counts != width).any():
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        rectangle.gather = torch.from_numpy((offsets[:, None] + columns).reshape(-1)).to(device)
        inside = np.arange(width) < counts[:, None]
        rectangle.scatter = torch.from_numpy(np.flatnonzero(inside)).to(device)
    return rectangle
