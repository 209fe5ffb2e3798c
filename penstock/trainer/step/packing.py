"""Turns scored groups into step plans. It is pure and without torch, so that the controller plans by itself.

Every rank gets the same number of micro-batches (they run in lockstep) of about the same size, and every plan
carries the denominators of the whole step.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

import msgspec
import numpy as np

from penstock.records import DEFAULT_POLICY, NOT_SAMPLED, Sample, Score, ScoredGroup, StepPlan, TrainSequence
from penstock.trainer.step.sharing import find_families, num_loss_positions

Samples = Sequence[Sequence[Sample]]
"""The samples of each episode of a group."""


ATTENTION_TOKENS = 16384
"""The length at which a sequence has as much work in attention as in everything else: about six times the model's
width. This is for a width of 2,700, and balances ranks well enough for others."""


def plan_step(
    step: int,
    groups: Sequence[ScoredGroup],
    *,
    micro_batch_tokens: int,
    ranks: int = 1,
    shared_prompts: bool = False,
    samples: Sequence[Samples] | None = None,
    policy: str = DEFAULT_POLICY,
    publishes: int | None = None,
    age_of: Sequence[Callable[[int], int]] | None = None,
    fresh: tuple[int, ...] | None = None,
    traced: tuple[tuple[int, int], ...] = (),
) -> tuple[StepPlan, ...]:
    """Make one plan per rank. `samples` replace those of the groups' episodes, for instance to mask late tokens.
    Sequences without a loss token, or sampled by another policy, are not planned. `age_of` gives the age of a
    version in each group, and `fresh` the versions of the weights that are trained; without them, version v is that
    of the weights after step v. `traced` are the answers whose single tokens are reported. With shared prompts a
    group stays together if possible, and its prompt counts once in every micro-batch that it is in."""
    if samples is None:
        samples = [[group.samples(index) for index in range(len(group.scores))] for group in groups]
    sequences = _sequences(samples, policy)
    pieces, costs, work = _pieces(sequences, micro_batch_tokens, ranks, shared_prompts)
    bins = pack(costs, micro_batch_tokens, multiple_of=ranks)
    shares = share_out([sum(work[piece] for piece in members) for members in bins], ranks)
    scores = tuple(tuple(_without_columns(score) for score in group.scores) for group in groups)
    columns = sorted({name for sequence in sequences for name in sequence.sample.columns})
    num_tokens = tuple(
        tuple(episode.num_output_tokens for episode in group.group.episodes) for group in groups
    )
    num_loss_tokens = sum(num_loss_positions(sequence.sample) for sequence in sequences)
    if age_of is None:
        age_of = [lambda version: step - 1 - version] * len(groups)
    ages = tuple(
        {version: of_group(version) for version in _versions(group, policy)}
        for of_group, group in zip(age_of, samples, strict=True)
    )
    return tuple(
        StepPlan(
            step=step,
            policy=policy,
            publishes=publishes,
            ages=ages,
            fresh=(step - 1,) if fresh is None else fresh,
            scores=scores,
            micro_batches=tuple(
                tuple(sequences[index] for piece in bins[chosen] for index in pieces[piece])
                for chosen in share
            ),
            num_loss_tokens=num_loss_tokens,
            num_sequences=len(sequences),
            num_tokens=num_tokens,
            columns=tuple(columns),
            traced=traced,
        )
        for share in shares
    )


def pack(costs: Sequence[int], budget: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Pack indices into level bins of at most `budget`: as many bins as best-fit needs, rounded up to a multiple,
    or more where they can't be levelled. A cost above the budget gets a bin of its own."""
    if budget < 1 or multiple_of < 1:
        raise ValueError(f"budget and multiple_of must be >= 1, got {budget} and {multiple_of}")
    if not costs:
        return [[] for _ in range(multiple_of)]
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    num_bins = _count_bins([costs[index] for index in order], budget)
    num_bins = -(-num_bins // multiple_of) * multiple_of
    while True:
        bins, fits = _level(costs, order, num_bins, budget)
        if fits:
            return bins
        # Add one at a time, or one percent where there are hundreds of bins: trying each would take minutes.
        num_bins += multiple_of * max(1, num_bins // (100 * multiple_of))


def share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal bins to ranks, the same number to each, largest first to the rank with the least."""
    if len(sizes) % ranks:
        raise ValueError(f"{len(sizes)} micro-batches can't be dealt equally to {ranks} ranks")
    quota = len(sizes) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = min((r for r in range(ranks) if len(shares[r]) < quota), key=lambda r: loads[r])
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return shares


def _sequences(groups: Sequence[Samples], policy: str) -> list[TrainSequence]:
    sequences = []
    for group_index, episodes in enumerate(groups):
        for episode_index, samples in enumerate(episodes):
            sequences += [
                TrainSequence(sample=sample, group=group_index, episode=episode_index, number=number)
                for number, sample in enumerate(samples)
                if sample.policy == policy and num_loss_positions(sample)
            ]
    return sequences


def _versions(group: Samples, policy: str) -> set[int]:
    """Return the versions that sampled a token of the loss."""
    found: set[int] = set()
    for sample in (sample for row in group for sample in row if sample.policy == policy):
        versions = sample.versions[sample.loss_mask]
        # Tokens of one version are adjacent, so their first tokens suffice.
        begins = np.flatnonzero(np.diff(versions, prepend=NOT_SAMPLED))
        found.update(versions[begins].tolist())
    return found


def _without_columns(score: Score) -> Score:
    """Drop a score's columns, which travel with the samples to the one rank that needs them."""
    return msgspec.structs.replace(score, columns=()) if score.columns else score


def _pieces(
    sequences: Sequence[TrainSequence], budget: int, ranks: int, shared: bool
) -> tuple[list[list[int]], list[int], list[int]]:
    """Return what is packed as one piece, by index, with its tokens and its work including attention. A piece is
    a single sequence, or as much of a group as fits, and no more than a rank's share."""
    families = find_families(sequences, shared=shared)
    total = sum(family.prefix + sum(family.rests) for family in families)
    limit = min(budget, -(-total // ranks))
    pieces, costs, work = [], [], []
    for family in families:
        rests = family.rests
        # There must be room for the longest member in any case.
        room = max(1, limit - family.prefix, *rests)
        for part in pack(rests, room):
            pieces.append([family.members[index] for index in part])
            costs.append(family.prefix + sum(rests[index] for index in part))
            pairs = sum(family.lengths[index] ** 2 for index in part)
            work.append(costs[-1] + pairs // ATTENTION_TOKENS)
    return pieces, costs, work


def _count_bins(costs: Sequence[int], budget: int) -> int:
    """Return how many bins best-fit decreasing needs."""
    free: list[int] = []
    for cost in costs:
        best = bisect_left(free, cost)
        room = free.pop(best) if best < len(free) else max(budget, cost)
        insort(free, room - cost)
    return len(free)


def _level(
    costs: Sequence[int], order: Sequence[int], num_bins: int, budget: int
) -> tuple[list[list[int]], bool]:
    """Deal the longest first to the emptiest bin. Return the bins, and whether each keeps the budget or holds a
    single sequence above it."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    heapify(heap)
    for item in order:
        load, index = heap[0]
        bins[index].append(item)
        heapreplace(heap, (load + costs[item], index))
    fits = all(load <= budget or len(bins[index]) == 1 for load, index in heap)
    return bins, fits
