"""A rank that dies takes its group down, and all of it comes back under a new address."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.errors import RemoteError, UserError, WorkerDied
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.trainer_ranks import TrainerRanks
from penstock.trainer.trainer_start import TrainerStart

START = TrainerStart(
    model="m",
    device="cpu",
    threads=1,
    total_steps=1,
    seed=0,
    folder="",
    sync={},
    wire_dtype="float32",
    trainer={},
    algorithm={},
)


class Client:
    def __init__(self) -> None:
        self.started: list[TrainerStart] = []
        self.fault: Exception | None = None
        self.loads: Awaitable[object] | None = None

    async def call(self, method: object, start: TrainerStart) -> None:
        self.started.append(start)
        if self.loads is not None:
            await self.loads
        if self.fault is not None:
            raise self.fault


class Place:
    """`penstock.processes.replaceable.ReplaceableWorker` without a process."""

    def __init__(self, name: str) -> None:
        self.name, self.client, self.incarnation = name, Client(), 0
        self.death: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self.ended = 0
        self.last_death: WorkerDied | None = None

    def set_start(self, start: Callable[[Any], Awaitable[object]]) -> None:
        self._start = start

    async def start(self) -> None:
        self.incarnation += 1
        await self._start(self.client)

    async def end(self) -> None:
        self.ended += 1

    async def gone(self) -> WorkerDied:
        return await asyncio.shield(self.death)

    died = gone

    async def give_up(self, why: str = "") -> None:
        self.ended += 1

    def write_stacks(self) -> str | None:
        return f"{self.name}.log"


def places() -> tuple[TrainerRanks, list[Place]]:
    members = [Place("trainer"), Place("trainer1")]

    return TrainerRanks(members, START, meet="file:///run/ranks"), members  # type: ignore[arg-type]


def test_each_rank_is_told_which_it_is_and_all_meet_in_one_place() -> None:
    asyncio.run(_each_rank_is_told())


async def _each_rank_is_told() -> None:
    group, members = places()
    await group.start()
    starts = [member.client.started[0] for member in members]
    assert [start.rank for start in starts] == [0, 1]
    assert starts[0].rendezvous == starts[1].rendezvous
    assert starts[0].rendezvous.startswith("file:///run/ranks-")
    assert (group.name, group.incarnation, group.write_stacks()) == (
        "trainer",
        1,
        "trainer.log, trainer1.log",
    )


def test_one_death_ends_all_and_the_next_group_meets_elsewhere() -> None:
    asyncio.run(_one_death())


async def _one_death() -> None:
    group, members = places()
    await group.start()
    members[1].death.set_result(WorkerDied("trainer1 was killed"))
    assert str(await group.gone()) == "trainer1 was killed"
    await group.restart()
    assert [member.ended for member in members] == [1, 1]
    first, second = members[0].client.started
    assert first.rendezvous != second.rendezvous
    assert members[1].client.started[1].rendezvous == second.rendezvous


def test_what_keeps_one_from_starting_is_raised_and_the_others_are_cancelled() -> None:
    asyncio.run(_one_does_not_start())


async def _one_does_not_start() -> None:
    group, members = places()
    members[1].client.fault = UserError("no such model")
    with pytest.raises(UserError, match="no such model"):
        await group.start()


def test_a_rank_that_dies_while_another_still_loads_ends_the_start() -> None:
    """The other would wait for it in their first exchange."""

    async def main() -> None:
        group, members = places()
        loading = asyncio.Event()
        members[1].client.loads = loading.wait()
        starting = asyncio.ensure_future(group.start())
        await asyncio.sleep(0)
        members[0].death.set_result(WorkerDied("trainer was killed"))
        with pytest.raises(WorkerDied, match="trainer was killed"):
            await starting

    run_in_virtual_time(main())


def test_a_death_at_the_start_says_more_than_the_error_of_a_rank_that_lost_its_partner() -> None:
    async def main() -> None:
        group, members = places()
        members[0].client.fault = RemoteError("RuntimeError: connection closed by peer")

        async def dies_late() -> None:
            await asyncio.sleep(1.0)
            raise WorkerDied("trainer1 was killed")

        members[1].client.loads = dies_late()
        with pytest.raises(WorkerDied, match="trainer1 was killed"):
            await group.start()

    run_in_virtual_time(main())
