"""Finds the tokens that the sequences of a group have in common at their start, and lays them out once in a row.

It is pure and without torch: the controller counts with it, the trainer lays out rows with it. Rows are laid
out as `penstock.trainer.forward.shared_prefixes` reads them: shared prefixes, sequences that share nothing,
then the rests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.records import IntArray, Sample, TrainSequence

Marks = npt.NDArray[np.integer[Any]]
"""A row for each token of a sequence, or its tokens themselves."""


def loss_positions(sample: Sample) -> IntArray:
    """Return the positions of the loss tokens. A first token has no context to be predicted from, so it never
    counts."""
    positions = np.flatnonzero(sample.loss_mask).astype(np.int32)
    return positions[1:] if positions.size and positions[0] == 0 else positions


def num_loss_positions(sample: Sample) -> int:
    return int(np.count_nonzero(sample.loss_mask[1:]))


def forward_length(sample: Sample) -> int:
    """Return how many tokens must run through the model: all before the last one in the loss; 0 without any."""
    positions = loss_positions(sample)
    return int(positions[-1]) if positions.size else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Groups sequences, by their index, that run their first `prefix` tokens together. A sequence that shares
    nothing is a family by itself, with a prefix of 0."""

    members: tuple[int, ...]
    prefix: int
    lengths: tuple[int, ...]
    """Forward tokens of each member, the prefix included."""

    @property
    def rests(self) -> list[int]:
        return [length - self.prefix for length in self.lengths]

    @property
    def num_shared_tokens(self) -> int:
        """Return how many tokens need not run because another member's do."""
        return self.prefix * (len(self.members) - 1)


def find_families(
    sequences: Sequence[TrainSequence], *, shared: bool, marks: Sequence[Marks] | None = None
) -> list[Family]:
    """Find the common start of each group's sequences: their prompt, and also sampled tokens if all are the
    same. Nothing is shared across groups. `marks` has one row per token of each sequence, which must be the
    same too: the experts that the token is computed with."""
    lengths = [forward_length(sequence.sample) for sequence in sequences]
    by_group: dict[tuple[int, bytes], list[int]] = {}
    for index, sequence in enumerate(sequences):
        prompt = b"" if marks is None else marks[index][: _prompt_length(sequence.sample)].tobytes()
        by_group.setdefault((sequence.group, prompt) if shared else (index, b""), []).append(index)
    families = []
    for members in by_group.values():
        prefix = _common([sequences[index].sample.token_ids[: lengths[index]] for index in members])
        if marks is not None:
            prefix = _common([marks[index][:prefix] for index in members])
        if len(members) > 1 and prefix:
            sizes = tuple(lengths[index] for index in members)
            families.append(Family(members=tuple(members), prefix=prefix, lengths=sizes))
        else:
            families += [Family(members=(index,), prefix=0, lengths=(lengths[index],)) for index in members]
    return families


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Holds tokens start..stop of a sequence, as they are laid out in a row."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Lists the segments of a row in order, and the positions of every sequence's tokens in them."""

    segments: tuple[Segment, ...]
    members: tuple[int, ...]
    """The number of rests of each shared prefix. The first segments are the prefixes, the last the rests."""
    positions: tuple[IntArray, ...]
    """The position in the row of each forward token of each sequence."""
    num_shared_tokens: int

    @classmethod
    def of(
        cls, sequences: Sequence[TrainSequence], *, shared: bool, marks: Sequence[Marks] | None = None
    ) -> "RowLayout":
        families = find_families(sequences, shared=shared, marks=marks)
        split = [family for family in families if family.prefix and any(family.rests)]
        whole = [family for family in families if not (family.prefix and any(family.rests))]
        segments = [Segment(sequence=f.members[0], start=0, stop=f.prefix) for f in split]
        segments += [Segment(sequence=f.members[0], start=0, stop=f.lengths[0]) for f in whole]
        segments += [
            Segment(sequence=index, start=f.prefix, stop=length)
            for f in split
            for index, length in zip(f.members, f.lengths, strict=True)
            if length > f.prefix
        ]
        return cls(
            segments=tuple(segments),
            members=tuple(sum(rest > 0 for rest in family.rests) for family in split),
            positions=_positions(segments, families, len(sequences)),
            num_shared_tokens=sum(family.num_shared_tokens for family in families),
        )


def _positions(segments: Sequence[Segment], families: Sequence[Family], count: int) -> tuple[IntArray, ...]:
    begins = np.cumsum([0, *[segment.stop - segment.start for segment in segments]])
    place_of = {
        (segment.sequence, segment.start): np.arange(
            begin, begin + segment.stop - segment.start, dtype=np.int32
        )
        for segment, begin in zip(segments, begins[:-1], strict=True)
    }
    nothing: IntArray = np.zeros(0, dtype=np.int32)
    positions = [nothing] * count
    for family in families:
        first = place_of[family.members[0], 0]
        for index in family.members:
            rest = place_of.get((index, family.prefix), nothing) if family.prefix else nothing
            positions[index] = np.concatenate([first, rest])
    return tuple(positions)


def _prompt_length(sample: Sample) -> int:
    positions = loss_positions(sample)
    return int(positions[0]) if positions.size else 0


def _common(rows: Sequence[Marks]) -> int:
    """Return how many tokens, or rows of marks, all of them begin with."""
    length = min(len(row) for row in rows)
    first = rows[0][:length]
    for row in rows[1:]:
        differs = np.flatnonzero((first[:length] != row[:length]).reshape(length, -1).any(axis=1))
        length = int(differs[0]) if differs.size else length
    return length
