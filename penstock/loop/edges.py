"""Declares what the loop sees of the rest: protocols that real processes, simulations and tests implement.

Engines, trainers, scorers and blob stores are in `penstock.records.interfaces`, the log of attempts in
`group_log.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from penstock.loop.admission import StepGroups
from penstock.loop.resume import Resume
from penstock.loop.step_planner import TrainedStep
from penstock.records import (
    CallAnswer,
    Episode,
    Group,
    StepPlan,
    StepResult,
    Task,
    UpdateReceipt,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Describes an update that reached every engine: how long its parts took, and what was sent."""

    receipt: UpdateReceipt
    snapshot_s: float
    publish_s: float
    fresh_s: float
    num_bytes: int
    num_skipped: int


class LoopEvents(Protocol):
    """Receives what happens in the loop (`penstock.run.controller_events.ControllerEvents`). The stages of
    groups do not come here: they follow from the records."""

    def now(self) -> float: ...

    def log(self, line: str) -> None:
        """Show a line to the user."""

    def measure(self, track: str, name: str, /, **attributes: int | str) -> AbstractContextManager[None]:
        """Report how long a block took, as a span."""

    def admission_blocked(self, start: float, reason: str) -> None: ...

    def waited(self, start: float, taken: StepGroups) -> dict[str, float]:
        """Note that the trainer has waited for these groups since `start`. Returns the seconds by cause."""

    def trained(self, step: TrainedStep, max_staleness: int) -> None: ...

    def updated(self, delivered: Delivered) -> None: ...


class GroupRunner(Protocol):
    """Generates the episodes of a group (`penstock.rollout.group_runner.RolloutRunner`)."""

    async def run_group(
        self,
        number: int,
        task: Task,
        *,
        ended: Callable[[Episode], None],
        done: Mapping[int, Episode] | None = None,
        calls: Sequence[CallAnswer] = (),
    ) -> Group: ...


class Ranks(Protocol):
    """Runs steps on the ranks of a trainer (`penstock.processes.trainer_group.TrainerGroup`)."""

    async def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """Make one optimizer step, with a plan for each part of the data."""


class Checkpoints(Protocol):
    """Saves a run's state between steps (`penstock.durability.checkpoints.Checkpoints`)."""

    def is_due(self, step: int) -> bool: ...

    async def begin(self, point: Resume) -> None:
        """Copy what belongs to a checkpoint; it is written beside the next steps."""

    async def settle(self) -> None:
        """Wait until the checkpoint that was begun is durable."""

    def rolled_back(self, step: int) -> None:
        """Forget the steps after this one, which are undone."""
