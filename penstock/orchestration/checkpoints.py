"""Checkpoints of a run: what they hold, where they are, and when they are written.

    RUN/checkpoints/step-N/progress.json    steps, versions, place in the tasks (the controller's part)
                           trainer/         optimizer, schedule, random numbers (`penstock.trainer.state_files`)
                           model/           the weights of step N in Hugging Face format

A checkpoint is written between two steps, by the trainer, into a folder without a name; it gets its name when all
of it is on the disk. So each one that is found is whole. Groups under way are not in it: their tasks are, and are
generated again.
"""

import math
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from penstock.buffer.admission import GateState
from penstock.buffer.history import HistoryState
from penstock.errors import RemoteError, UserError
from penstock.observe.recorder import Recorder
from penstock.orchestration.closed_loop import starting_bound
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.resume import Resume
from penstock.tasks.stream import StreamState, TaskStream
from penstock.types import Record

FORMAT = 1
"""Of checkpoints. Other numbers are refused."""
FOLDER = "checkpoints"
PROGRESS = "progress.json"
_NAME = re.compile(r"step-(\d+)")

Part = Literal["reward", "workflow", "tasks"]


class Progress(Record, frozen=True, kw_only=True):
    """How far a run has come."""

    format: int = FORMAT
    step: int
    max_staleness: int
    """The bound in force, which the closed loop may have changed."""
    num_admitted: int
    history: HistoryState
    consumed: tuple[tuple[int, int], ...] = ()
    """The groups that its weights were trained on, as spans of numbers: (first, last). An audit needs no ledger."""
    tasks: StreamState
    """With the tasks of the groups that were under way put back."""
    heldout: tuple[tuple[int, float | None], ...] = ()
    """(step, mean held-out reward) of every evaluation so far; None where nothing could be scored."""
    only_in_python: tuple[Part, ...] = ()
    """What the run was given as Python objects, which its config can't name."""

    @property
    def rewards(self) -> tuple[tuple[int, float], ...]:
        return tuple((step, math.nan if reward is None else reward) for step, reward in self.heldout)

    def resume(self, config: PenstockConfig) -> Resume:
        """For a controller that has nothing under way."""
        staleness = config.staleness
        gate = GateState(
            step=self.step,
            served_step=self.step,
            max_staleness=self.max_staleness if staleness.adaptive else starting_bound(staleness),
            num_admitted=self.num_admitted,
            num_trained=self.step * config.rollout.groups_per_step,
            running=(),
            ready=(),
            consumed=self.consumed,
        )
        return Resume(gate=gate, history=self.history, running={})


class _Format(msgspec.Struct):
    format: int


def read_progress(checkpoint: Path) -> Progress:
    path = checkpoint / PROGRESS
    try:
        data = path.read_bytes()
        number = msgspec.json.decode(data, type=_Format).format
        if number == FORMAT:
            return msgspec.json.decode(data, type=Progress)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} can't be read ({error}); remove {checkpoint} to go on without it") from error
    raise UserError(
        f"{checkpoint} has format {number}, and this Penstock reads format {FORMAT}; use the version of Penstock "
        "that wrote it"
    )


def checkpoints_of(run: Path) -> dict[int, Path]:
    """The whole checkpoints of a run by step, oldest first."""
    found = {}
    for path in (run / FOLDER).glob("step-*"):
        named = _NAME.fullmatch(path.name)
        if named and (path / PROGRESS).is_file():
            found[int(named[1])] = path
    return dict(sorted(found.items()))


def sweep_unfinished(run: Path) -> None:
    """Remove what a run that was killed left while it wrote or removed a checkpoint."""
    for path in (run / FOLDER).glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


class CheckpointingTrainer(Protocol):
    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None: ...


class Checkpoints:
    """Writes the checkpoints of one run and keeps the last few. One that can't be written is told and costs nothing
    but itself."""

    def __init__(
        self,
        run: Path,
        trainer: CheckpointingTrainer,
        tasks: TaskStream,
        *,
        every: int,
        keep: int,
        events: Recorder,
        heldout: Callable[[], Sequence[tuple[int, float]]] = tuple,
        only_in_python: tuple[Part, ...] = (),
        covered: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`covered` is told the step of the oldest one that is kept, after each that was written."""
        self._covered = covered
        self._run = run
        self._trainer = trainer
        self._tasks = tasks
        self._every = every
        self._keep = keep
        self._events = events
        self._heldout = heldout
        self._only_in_python = only_in_python

    def is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    async def write_last(self, stand: Resume) -> None:
        """At the end of a run that has checkpoints: it can be resumed with more steps."""
        step = stand.gate.step
        if self._every > 0 and step > 0 and step not in checkpoints_of(self._run):
            await self.write(stand)

    async def write(self, stand: Resume) -> None:
        """`stand` must be of this moment, between two steps."""
        step = stand.gate.step
        folder = self._run / FOLDER / f"step-{step}"
        progress = msgspec.json.encode(self._progress(stand))
        try:
            with self._events.measure("train", "checkpoint", step=step):
                await self._trainer.checkpoint(str(folder), {PROGRESS: progress}, self._superfluous(step))
        except (RemoteError, UserError) as error:
            self._events.log(f"the checkpoint of step {step} could not be written: {error}; the run goes on")
            return
        if self._covered is not None:
            await self._covered(min(checkpoints_of(self._run)))

    def _progress(self, stand: Resume) -> Progress:
        gate = stand.gate
        tickets = [*(group.ticket for group in gate.ready), *gate.running]
        under_way = [stand.running[number].id for number in sorted(ticket.number for ticket in tickets)]
        place = self._tasks.state()
        return Progress(
            step=gate.step,
            max_staleness=gate.max_staleness,
            num_admitted=gate.num_admitted,
            history=stand.history,
            consumed=gate.consumed,
            tasks=msgspec.structs.replace(place, returned=(*under_way, *place.returned)),
            heldout=tuple(self._heldout()),
            only_in_python=self._only_in_python,
        )

    def _superfluous(self, step: int) -> list[str]:
        """Checkpoints that go when the one of `step` is there; those of later steps are of a history that was given
        up."""
        others = {number: path for number, path in checkpoints_of(self._run).items() if number != step}
        older = [number for number in others if number < step]
        kept = older[max(0, len(older) - self._keep + 1) :]
        return [str(path) for number, path in others.items() if number not in kept]
