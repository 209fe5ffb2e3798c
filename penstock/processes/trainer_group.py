"""Calls the ranks of a trainer as one: each gets its part, and their answers are combined."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from penstock.channel import implement
from penstock.errors import RemoteError, StepTooLarge, TrainerLost, UpdateAbandoned, UserError
from penstock.records import CheckpointWritten, StepPlan, StepResult, WeightUpdate
from penstock.records.interfaces import Trainer
from penstock.sync.joined_update import join_updates

T = TypeVar("T")

ANSWER_GRACE_S = 5.0
"""How long the other ranks may take to answer when one has failed. They wait for it in vain, or fail as well."""


class TrainerGroup:
    """Calls the ranks of a trainer together. `as_one` is the `penstock.records.interfaces.Trainer` that they form.

    A single rank is `as_one` itself. With several, a call goes to all of them and the first rank's answer is
    returned, unless a method here combines the answers.
    """

    def __init__(
        self,
        ranks: Sequence[Trainer],
        *,
        share_plans: int = 1,
        give_up: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`share_plans` neighbours train on one plan: they split a sequence or the matrices of a layer.
        `give_up` kills all ranks when some would wait for ever."""
        self._ranks = ranks
        self._share_plans = share_plans
        self._give_up = give_up
        self.as_one = (
            ranks[0]
            if len(ranks) == 1
            else implement(
                Trainer,
                self._asking_all,
                step=self.step,
                publish=self.publish,
                send=self.send,
                checkpoint_written=self.checkpoint_written,
            )
        )

    @property
    def num_plans(self) -> int:
        return len(self._ranks) // self._share_plans

    async def step(self, plan: StepPlan) -> StepResult:
        """Make a step that has a single plan."""
        (result,) = await self.run([plan])
        return result

    async def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        """Make one optimizer step. Of the ranks that share a plan, the first one's result is returned."""
        if len(plans) != self.num_plans:
            raise ValueError(f"{self.num_plans} plans are needed, got {len(plans)}")
        steps = [rank.step(plans[at // self._share_plans]) for at, rank in enumerate(self._ranks)]
        results = await self._together(steps)
        return results[:: self._share_plans]

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        return join_updates(await self._together([rank.publish(version, full=full) for rank in self._ranks]))

    async def send(self, version: int) -> None:
        """Send a version's weights. When an engine fails, ranks that wait for it are only cancelled, since they
        are healthy."""
        await self._together([rank.send(version) for rank in self._ranks], gives_up=False)

    async def checkpoint_written(self) -> CheckpointWritten:
        parts = await self._together([rank.checkpoint_written() for rank in self._ranks])
        return CheckpointWritten(
            seconds=max(part.seconds for part in parts), num_bytes=max(part.num_bytes for part in parts)
        )

    def _asking_all(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*args: Any, **kwargs: Any) -> Any:
            answers = await self._together([getattr(rank, method)(*args, **kwargs) for rank in self._ranks])
            return answers[0]

        return ask

    async def _together(self, calls: Sequence[Coroutine[Any, Any, T]], *, gives_up: bool = True) -> list[T]:
        """Return every rank's answer, or raise the error that explains most.

        Ranks that still wait for a failed one are killed, unless cancelling them is enough.
        """
        if len(calls) == 1:
            return [await calls[0]]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if waiting and gives_up:
                _, waiting = await asyncio.wait(waiting, timeout=ANSWER_GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
        if not errors:
            return [task.result() for task in tasks]
        worst = min(errors, key=_rank_of)
        # Ranks stopped at different points, perhaps inside a collective, so all of them restart together.
        has_no_room = isinstance(worst, StepTooLarge)
        if (has_no_room or (waiting and gives_up)) and self._give_up is not None:
            why = f"the trainer's ranks can't continue without one that failed: {worst}"
            await self._give_up(why)
            if has_no_room or not isinstance(worst, UserError):
                raise TrainerLost(why) from worst
        raise worst


def group_of(trainers: Sequence[Trainer] | TrainerGroup) -> TrainerGroup:
    """Return a `TrainerGroup` of trainers that each have a plan of their own; one that exists is returned as it
    is."""
    return trainers if isinstance(trainers, TrainerGroup) else TrainerGroup(trainers)


def _rank_of(error: BaseException) -> int:
    """Return the sort key of an error, the most telling first: a process that is gone, then one that knows what
    went wrong, then those that could not reach another rank."""
    if isinstance(error, TrainerLost):
        return 0
    if "another rank" in str(error) or isinstance(error, UpdateAbandoned):
        return 2
    return 3 if isinstance(error, RemoteError) else 1
