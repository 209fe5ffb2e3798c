"""Sends a step plan to a trainer process, in pieces of a bounded size.

The first message also has the plan's header, and the last one runs the plan, so a small step is a single message.
The sender awaits each message. So only one is on its way at a time, and no message holds a large step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.channel import Channel, remote, serve
from penstock.channel.protocol_calls import Place
from penstock.records import Record, Score, StepPlan, StepResult, TrainSequence
from penstock.records.interfaces import Trainer

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""The approximate size of a piece. A single sequence is never cut, however long."""
RECORD_BYTES = 256
"""The approximate size of a record without its arrays."""


class PlanHeader(Record, frozen=True, kw_only=True):
    """Holds a plan without the parts that grow with it, and how many of these will come."""

    plan: StepPlan
    num_groups: int
    num_micro_batches: int
    num_train_sequences: int


class PlacedSequence(Record, frozen=True, kw_only=True):
    micro_batch: int
    sequence: TrainSequence


class PlanPiece(Record, frozen=True, kw_only=True):
    """Holds the next groups' scores and tokens, or the next sequences."""

    scores: tuple[tuple[Score, ...], ...] = ()
    num_tokens: tuple[tuple[int, ...], ...] = ()
    sequences: tuple[PlacedSequence, ...] = ()


class PlanMessage(Record, frozen=True, kw_only=True):
    """Carries the next piece, and in the first message the header."""

    header: PlanHeader | None = None
    piece: PlanPiece
    is_last: bool = False


class PlanTaker(Protocol):
    """Takes a plan in several messages, and runs it with the last one."""

    async def take(self, message: PlanMessage) -> StepResult | None: ...


def remote_trainer(at: Channel | Place, lost: Callable[[str], Exception] | None = None) -> Trainer:
    """Return a `penstock.records.interfaces.Trainer` that runs in another process."""
    taker = remote(PlanTaker, at, lost=lost)

    async def step(plan: StepPlan) -> StepResult:
        *earlier, last = messages_of(plan)
        for message in earlier:
            await taker.take(message)
        result = await taker.take(last)
        assert result is not None
        return result

    return remote(Trainer, at, lost=lost, step=step)


def serve_trainer(trainer: Trainer, channel: Channel) -> None:
    """Answer the calls of a `remote_trainer`."""
    serve(Trainer, trainer, channel)
    serve(PlanTaker, ArrivingPlans(trainer), channel)


class ArrivingPlans:
    """Assembles plans from their messages, and has the trainer run each."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._arriving: list[PlanAssembly] = []

    async def take(self, message: PlanMessage) -> StepResult | None:
        if message.header is not None:
            self._arriving = [PlanAssembly(message.header)]  # drops what a cancelled sender left unfinished
        self._arriving[0].add(message.piece)
        return await self._trainer.step(self._arriving.pop().plan()) if message.is_last else None


def messages_of(plan: StepPlan, max_bytes: int = PIECE_BYTES) -> list[PlanMessage]:
    """Return one message for each piece. An empty plan is a message too."""
    pieces = list(pieces_of(plan, max_bytes)) or [PlanPiece()]
    return [
        PlanMessage(
            header=header_of(plan) if index == 0 else None, piece=piece, is_last=index == len(pieces) - 1
        )
        for index, piece in enumerate(pieces)
    ]


def header_of(plan: StepPlan) -> PlanHeader:
    return PlanHeader(
        plan=msgspec.structs.replace(plan, scores=(), num_tokens=(), micro_batches=()),
        num_groups=len(plan.scores),
        num_micro_batches=len(plan.micro_batches),
        num_train_sequences=sum(len(batch) for batch in plan.micro_batches),
    )


def pieces_of(plan: StepPlan, max_bytes: int = PIECE_BYTES) -> Iterator[PlanPiece]:
    """Yield scores first, then sequences; each piece as full as `max_bytes` allows."""
    groups: list[tuple[int | PlacedSequence, int]] = [
        (index, _score_bytes(scores)) for index, scores in enumerate(plan.scores)
    ]
    sequences: list[tuple[int | PlacedSequence, int]] = [
        (PlacedSequence(micro_batch=index, sequence=sequence), _sequence_bytes(sequence))
        for index, batch in enumerate(plan.micro_batches)
        for sequence in batch
    ]
    for items in _filled([*groups, *sequences], max_bytes):
        chosen = [item for item in items if isinstance(item, int)]
        part = slice(chosen[0], chosen[-1] + 1) if chosen else slice(0)
        yield PlanPiece(
            scores=plan.scores[part],
            num_tokens=plan.num_tokens[part],
            sequences=tuple(item for item in items if not isinstance(item, int)),
        )


class PlanAssembly:
    """Collects the pieces of a plan."""

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
        """Return the whole plan; raise ValueError if something has not arrived."""
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
    """Yield items in order, as many together as fit."""
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
    if sample.mixed is not None:
        arrays.append(sample.mixed)
    num_records = (
        4
        + len(sample.turns)
        + len(sample.sampling_masks)
        + 2 * len(sample.routing)
        + len(sample.sampling.logit_bias)
        + len(arrays)
    )
    return RECORD_BYTES * num_records + sum(array.nbytes for array in arrays)
