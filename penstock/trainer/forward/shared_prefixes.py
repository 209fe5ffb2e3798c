"""Lays out a prefix that several sequences of a packed row share once, and lets each of them see it.

    prefix A │ prefix B │ alone │ rest A1 │ rest A2 │ rest A3 │ rest B1 │ rest B2

Every segment is causal in itself, and a rest sees its whole prefix before that. Everything outside of
attention runs once per token. In attention, a prefix's keys and values are gathered for each of its rests.
Any kernel that aligns fewer queries with the last of more keys can then compute it, sliding windows included.
Without such a kernel the prefix's queries are gathered too, and rows are what they would be without sharing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.models.transfer import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Maps a row with shared prefixes onto the row that repeats them."""

    lengths: tuple[int, ...]
    """Lengths of the sequences in the repeating row: prefixes by themselves, then each rest with its prefix."""
    to_repeated: torch.Tensor
    """(repeated tokens,): the position of each in the row."""
    to_row: torch.Tensor
    """(tokens,): one position of each in the repeating row."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], members: Sequence[int], device: torch.device | str = "cpu"
    ) -> "SharedPrefixes":
        """Build the mapping. The first segments of the row are the prefixes, the last ones the rests,
        `members[i]` of them for prefix i."""
        if min(members) < 1 or len(members) + sum(members) > len(lengths):
            raise ValueError(
                f"{len(lengths)} segments can't be prefixes with {list(members)} rests: every prefix is a "
                "segment, and needs a rest"
            )
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        num_others = len(lengths) - sum(members)
        first = starts[num_others]
        positions, repeated = [torch.arange(first)], list(lengths[:num_others])
        own, num_repeated, segment = [torch.arange(first)], first, num_others
        for prefix, count in enumerate(members):
            shared = torch.arange(starts[prefix], starts[prefix + 1])
            for rest in range(segment, segment + count):
                positions += [shared, torch.arange(starts[rest], starts[rest + 1])]
                num_repeated += len(shared)
                own.append(torch.arange(num_repeated, num_repeated + lengths[rest]))
                num_repeated += lengths[rest]
                repeated.append(len(shared) + lengths[rest])
            segment += count
        return cls(
            lengths=tuple(repeated),
            to_repeated=upload(torch.cat(positions).numpy(), torch.device(device)),
            to_row=upload(torch.cat(own).numpy(), torch.device(device)),
        )

    def repeat(self, row: torch.Tensor) -> torch.Tensor:
        """Map (tokens, …) to (repeated tokens, …), differentiably."""
        return gather(row, self.to_repeated)


def gather(row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select tokens of a (tokens, …) row, some of them several times. Their gradients are summed in float32: a
    prompt collects from all of its completions, and a GPU would round after each of them."""
    return _Gather.apply(row, index)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = row.shape[0]
        return row.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        exact = grad.dtype if grad.dtype == torch.float64 else torch.float32
        total = grad.new_zeros((ctx.num_tokens, *grad.shape[1:]), dtype=exact)
        return total.index_add_(0, index, grad.to(exact)).to(grad.dtype), None
