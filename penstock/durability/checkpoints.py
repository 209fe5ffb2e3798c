"""Writes and reads checkpoints of a run: what they hold, where they are, and when they are written.

    RUN/checkpoints/step-N/progress.json    steps, versions, position in the tasks (the controller's part)
                           trainer/         optimizer, schedule, random numbers (`checkpoint/state_files.py`)
                           model/           the weights of step N in Hugging Face format

A checkpoint is taken between two steps. The trainer copies its state then, and writes it beside the next
steps into a hidden folder, which gets its name when all of it is on the disk. So each checkpoint that is
found is complete, and nothing relies on one before that. Groups that are not trained yet are in the journal.
A checkpoint also holds their tasks, which a run without a journal takes again.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from penstock.checksums import check_files, write_checksums
from penstock.config.root import PenstockConfig
from penstock.durability.kept_checkpoints import (
    FOLDER,
    PROGRESS,
    checkpoints_of,
    keep_reward,
    point_to_best,
    rewards_of,
    superfluous,
)
from penstock.durability.run_facts import read_facts
from penstock.errors import RemoteError, TrainerLost, UserError
from penstock.loop.adaptive import starting_bound
from penstock.loop.admission import GateState
from penstock.loop.attempt_records import CheckpointKept
from penstock.loop.group_log import GroupLog, NoGroupLog
from penstock.loop.history import HistoryState
from penstock.loop.resume import Resume
from penstock.observe.events import CheckpointEvent
from penstock.observe.recorder import Recorder
from penstock.records import DEFAULT_POLICY, CheckpointWritten, Record
from penstock.safe_files import whole_folder
from penstock.tasks.stream import StreamState, TaskStream
from penstock.trainer.trainer_start import TRAINER_STATE

FORMAT = 1
"""The format of checkpoints. Other numbers are refused."""
BEGINNING = "beginning"
"""The folder with a run's progress at step 0, from which it resumes before its first checkpoint."""

Part = Literal["reward", "workflow", "tasks"]


class Progress(Record, frozen=True, kw_only=True):
    """Holds the controller's part of a checkpoint: how far the run has come."""

    format: int = FORMAT
    run: str = ""
    """The run that it belongs to (`RunFacts.id`)."""
    step: Annotated[int, msgspec.Meta(ge=0)]
    max_staleness: int
    """The bound in force, which the closed loop may have changed."""
    num_admitted: int
    history: HistoryState
    consumed: tuple[tuple[int, int], ...] = ()
    """The groups that its weights were trained on, as spans (first, last), so that an audit needs no journal."""
    tasks: StreamState
    """The position in the tasks, with the tasks of groups under way put back."""
    heldout: tuple[tuple[int, float | None], ...] = ()
    """(step, mean held-out reward) of every evaluation so far; None where nothing could be scored."""
    only_in_python: tuple[Part, ...] = ()
    """What the run was given as Python objects, which its config can't name."""

    @property
    def rewards(self) -> tuple[tuple[int, float], ...]:
        return tuple((step, math.nan if reward is None else reward) for step, reward in self.heldout)

    def resume(self, config: PenstockConfig) -> Resume:
        """Return the state of a controller that resumes with nothing under way."""
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
        return Resume(gate=gate, history=self.history, task_ids={})


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
        raise UserError(f"{path} is damaged: {error}") from error
    raise UserError(
        f"{checkpoint} has format {number}, and this Penstock reads format {FORMAT}; use the version of Penstock "
        "that wrote it"
    )


def write_beginning(run: Path, tasks: TaskStream, bound: int, only_in_python: tuple[Part, ...]) -> None:
    """Save step 0, so that a run that is stopped before its first checkpoint can resume. It holds no weights: a
    resumed run loads the model again."""
    progress = Progress(
        run=read_facts(run).id,
        step=0,
        max_staleness=bound,
        num_admitted=0,
        history=HistoryState(policy=DEFAULT_POLICY, steps=()),
        tasks=tasks.state(),
        only_in_python=only_in_python,
    )
    with whole_folder(run / BEGINNING) as unnamed:
        (unnamed / PROGRESS).write_bytes(msgspec.json.encode(progress))
        write_checksums(unnamed)


def open_checkpoint(checkpoint: Path) -> Progress:
    """Read the progress of a checkpoint, and refuse one with damaged files, or one of another step or run."""
    check_files(checkpoint, closed=TRAINER_STATE)
    progress, run = read_progress(checkpoint), checkpoint.parent.parent
    if checkpoint.name != f"step-{progress.step}":
        raise UserError(f"{checkpoint} is the checkpoint of step {progress.step} under another name")
    if progress.run and read_facts(run).id not in ("", progress.run):
        raise UserError(f"{checkpoint} is a checkpoint of another run")
    return progress


def newest_whole(run: Path, say: Callable[[str], None]) -> tuple[Path, Progress] | None:
    """Return the newest checkpoint that is undamaged, and log the damaged ones; None where there are no
    checkpoints yet.

    `UserError` when all of them are damaged.
    """
    first: UserError | OSError | None = None
    for path in reversed(checkpoints_of(run).values()):
        try:
            return path, open_checkpoint(path)
        except (UserError, OSError) as error:  # a disk may also fail to read
            say(f"{error}; the run goes back to the checkpoint before {path.name}")
            first = first or error
    if first is None:
        return None
    raise UserError(
        f"no checkpoint of {run} is as it was written: {first}; restore it from a copy, or train again from the "
        f"start with what the journal still has: penstock resume {run} --step 0"
    )


class CheckpointingTrainer(Protocol):
    """Declares the part of `penstock.records.interfaces.Trainer` that checkpoints need."""

    async def checkpoint(self, folder: str, files: dict[str, bytes], remove: Sequence[str] = ()) -> None: ...

    async def checkpoint_written(self) -> CheckpointWritten: ...


class Checkpoints:
    """Lets the trainer write a run's checkpoints, one at a time, and keeps the last few and the best.

    A checkpoint that can't be written is logged; the run continues without it.
    """

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
        log: GroupLog | None = None,
    ) -> None:
        """The `log` is made durable before each checkpoint. After one is on the disk, the log gets the step of
        the oldest checkpoint that a run may resume from."""
        self._log: GroupLog = log or NoGroupLog()
        self._run = run
        self._id = read_facts(run).id
        self._trainer = trainer
        self._tasks = tasks
        self._every = every
        self._keep = keep
        self._events = events
        self._heldout = heldout
        self._only_in_python = only_in_python
        self._last = max(checkpoints_of(run), default=0)
        """The step of the checkpoint that was begun last."""
        self._is_writing = False
        self._rewards: dict[int, float] = {}
        """The rewards of evaluations that have ended, by the step at which they began."""
        self._evaluating: set[int] = set()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due. None is while one is being written; a skipped one is due after
        that."""
        if self._every == 0 or step // self._every <= self._last // self._every:
            return False
        if self._is_writing and step % self._every == 0:
            self._events.log(
                f"the checkpoint of step {self._last} is still being written, so that of step {step} comes later"
            )
        return not self._is_writing

    async def begin(self, point: Resume) -> None:
        """Take the checkpoint of this moment, between two steps. The caller must `settle` it."""
        step = self._last = point.gate.step
        progress = msgspec.json.encode(self._progress(point))
        await self._log.durable()
        found, rewards = checkpoints_of(self._run), rewards_of(self._run)
        old = superfluous(found, step=step, keep=self._keep, rewards=rewards, evaluating=self._evaluating)
        try:
            with self._events.measure("train", "checkpoint", step=step):
                await self._trainer.checkpoint(
                    str(self._folder(step)), {PROGRESS: progress}, [str(found[one]) for one in old]
                )
        except (RemoteError, UserError) as error:
            self._tell_failure(step, error)
        else:
            self._is_writing = True

    async def settle(self) -> None:
        """Wait until the checkpoint that was begun is durable, and report it to the log."""
        if not self._is_writing:
            return
        step = self._last
        try:
            written = await self._trainer.checkpoint_written()
        except (RemoteError, UserError, TrainerLost) as error:
            self._tell_failure(step, error)
            return
        finally:
            self._is_writing = False
        events = self._events
        events.emit(
            CheckpointEvent(
                process=events.process,
                time=events.now(),
                step=step,
                write_s=written.seconds,
                num_bytes=written.num_bytes,
            )
        )
        self._keep_reward(step)
        await self._log.append(CheckpointKept(step=min(list(checkpoints_of(self._run))[-self._keep :])))

    def rolled_back(self, step: int) -> None:
        """Note that steps after this one are undone, and with them a checkpoint that was not durable yet."""
        self._last = step

    async def write(self, point: Resume) -> None:
        await self.begin(point)
        await self.settle()

    async def write_last(self, point: Resume) -> None:
        """Write a checkpoint at the end of a run, if it has checkpoints, so that it can resume with more steps."""
        step = point.gate.step
        if self._every > 0 and step > 0 and step not in checkpoints_of(self._run):
            await self.write(point)

    def evaluation_began(self, step: int) -> None:
        self._evaluating.add(step)

    def evaluation_ended(self, step: int, reward: float) -> None:
        self._evaluating.discard(step)
        self._rewards[step] = reward
        self._keep_reward(step)

    def _keep_reward(self, step: int) -> None:
        """Save the held-out reward once both the checkpoint and its evaluation are there, in whichever order."""
        if step not in self._rewards or step not in checkpoints_of(self._run):
            return
        try:
            keep_reward(self._folder(step), self._rewards[step])
            point_to_best(self._run)
        except OSError as error:
            self._events.log(
                f"the held-out reward of step {step} could not be kept with its checkpoint: {error}"
            )

    def _folder(self, step: int) -> Path:
        return self._run / FOLDER / f"step-{step}"

    def _tell_failure(self, step: int, error: Exception) -> None:
        events = self._events
        events.log(f"the checkpoint of step {step} could not be written: {error}; the run continues")
        events.emit(CheckpointEvent(process=events.process, time=events.now(), step=step, failure=str(error)))

    def _progress(self, point: Resume) -> Progress:
        gate = point.gate
        tickets = [*(group.ticket for group in gate.ready), *gate.running]
        under_way = [point.task_ids[number] for number in sorted(ticket.number for ticket in tickets)]
        place = self._tasks.state()
        return Progress(
            run=self._id,
            step=gate.step,
            max_staleness=gate.max_staleness,
            num_admitted=gate.num_admitted,
            history=point.history,
            consumed=gate.consumed,
            tasks=msgspec.structs.replace(place, returned=(*under_way, *place.returned)),
            heldout=tuple(self._heldout()),
            only_in_python=self._only_in_python,
        )
