"""A step plan on its way to a trainer process: a header, then pieces of a bounded size, then the word to run it.

The sender awaits each piece, so that no more than one is on its way and no message holds a whole step.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from penstock.channel import Channel, Method
from penstock.types import Record, Score, StepPlan, StepResult, TrainSequence

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""About what a piece holds. A single sequence is never cut, however long."""
RECORD_BYTES = 256
"""About what a record takes beside its arrays."""


class PlanHeader(Record, frozen=True, kw_only=True):
    """A plan without what grows with it, and how much of that will come."""

    plan: StepPlan
    num_groups: int
    num_micro_batches: int
    num_train_sequences: int


class PlacedSequence(Record, frozen=True, kw_only=True):
    micro_batch: int
    sequence: TrainSequence


class PlanPiece(Record, frozen=True, kw_only=True):
    """The next groups' scores and tokens, or the next sequences."""

    scores: tuple[tuple[Score, ...], ...] = ()
    num_tokens: tuple[tuple[int, ...], ...] = ()
    sequences: tuple[PlacedSequence, ...] = ()


BEGIN_STEP = Method("trainer.step.begin", PlanHeader, type(None))
ADD_TO_STEP = Method("trainer.step.add", PlanPiece, type(None))
RUN_STEP = Method("trainer.step.run", int, StepResult)


async def send_step(channel: Channel, plan: StepPlan) -> StepResult:
    """The caller's side: send a plan and wait for its result."""
    await channel.call(BEGIN_STEP, header_of(plan))
    for piece in pieces_of(plan):
        await channel.call(ADD_TO_STEP, piece)
    return await channel.call(RUN_STEP, plan.step)


def serve_steps(channel: Channel, step: Callable[[StepPlan], Awaitable[StepResult]]) -> None:
    """The trainer's side: put plans together and run each with `step`."""
    arriving: list[PlanAssembly] = []

    async def begin(header: PlanHeader) -> None:
        arriving[:] = [PlanAssembly(header)]  # what a cancelled sender left unfinished goes

    async def add(piece: PlanPiece) -> None:
        arriving[0].add(piece)

    async def run(number: int) -> StepResult:
        plan = arriving.pop().plan()
        assert plan.step == number
        return await step(plan)

    channel.serve(BEGIN_STEP, begin)
    channel.serve(ADD_TO_STEP, add)
    channel.serve(RUN_STEP, run)


def header_of(plan: StepPlan) -> PlanHeader:
    return PlanHeader(
        plan=msgspec.structs.replace(plan, scores=(), num_tokens=(), micro_batches=()),
        num_groups=len(plan.scores),
        num_micro_batches=len(plan.micro_batches),
        num_train_sequences=sum(len(batch) for batch in plan.micro_batches),
    )


def pieces_of(plan: StepPlan, max_bytes: int = PIECE_BYTES) -> Iterator[PlanPiece]:
    """Scores first, then sequences; each piece as full as `max_bytes` allows."""
    groups = [(index, _score_bytes(scores)) for index, scores in enumerate(plan.scores)]
    for chosen in _filled(groups, max_bytes):
        part = slice(chosen[0], chosen[-1] + 1)
        yield PlanPiece(scores=plan.scores[part], num_tokens=plan.num_tokens[part])
    sequences = [
        (PlacedSequence(micro_batch=index, sequence=sequence), _sequence_bytes(sequence))
        for index, batch in enumerate(plan.micro_batches)
        for sequence in batch
    ]
    for placed in _filled(sequences, max_bytes):
        yield PlanPiece(sequences=tuple(placed))


class PlanAssembly:
    """A plan that is arriving."""

    def __init__(self, header: PlanHeader) -> None:
        self._header = header
        self._scores: list[tuple[Score, ...]] = []
        self._num_tokens: list[tuple[int, ...]] = []
        self._batches: list[list[TrainSequence]] = [[] for _ in range(header.num_micro_batches)]

    def add(self, piece: PlanPiece) -> None:
        self._scores += piece.scores
        self._num_tokens += piece.num_tokens
        for placed in piece.sequences:
            self._batches[placed.micro_batch].append(placed.sequence)

    def plan(self) -> StepPlan:
        """The whole plan; ValueError when something has not come."""
        header = self._header
        expected = (header.num_groups, header.num_train_sequences)
        got = (len(self._scores), sum(len(batch) for batch in self._batches))
        if got != expected:
            raise ValueError(
                f"the plan of step {header.plan.step} must have {expected[0]} groups and {expected[1]} "
                f"sequences, got {got[0]} and {got[1]}"
            )
        return msgspec.structs.replace(
            header.plan,
            scores=tuple(self._scores),
            num_tokens=tuple(self._num_tokens),
            micro_batches=tuple(tuple(batch) for batch in self._batches),
        )


def _filled(items: Iterable[tuple[T, int]], max_bytes: int) -> Iterator[list[T]]:
    """Items in order, as many together as fit."""
    held: list[T] = []
    size = 0
    for item, num_bytes in items:
        if held and size + num_bytes > max_bytes:
            yield held
            held, size = [], 0
        held.append(item)
        size += num_bytes
    if held:
        yield held


def _score_bytes(scores: Sequence[Score]) -> int:
    return RECORD_BYTES * sum(
        1 + len(score.parts) + len(score.steps) + len(score.columns) for score in scores
    )


def _sequence_bytes(sequence: TrainSequence) -> int:
    sample = sequence.sample
    arrays = [sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions, *sample.columns.values()]
    num_records = (
        4 + len(sample.turns) + len(sample.sampling_masks) + len(sample.sampling.logit_bias) + len(arrays)
    )
    return RECORD_BYTES * num_records + sum(array.nbytes for array in arrays)
