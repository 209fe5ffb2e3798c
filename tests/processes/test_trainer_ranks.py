"""A rank that dies takes its group down, and all of it comes back under a new address."""

import asyncio
from collections.abc import Awaitable

import pytest

from penstock.errors import RemoteError, UserError, WorkerDied
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.processes.trainer_ranks import TrainerRanks
from penstock.trainer.trainer_start import TrainerStart
from tests.processes.dying_worker import DyingWorker
from tests.trainer.trainer_starts import make_start

START = make_start()


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


class Rank(DyingWorker):
    """A rank that is started in this process, and counts how often it was ended."""

    incarnation = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.client = Client()
        self.ended = 0

    async def start(self) -> None:
        self.incarnation += 1
        await self._start(self.client)

    async def end(self) -> None:
        self.ended += 1

    async def give_up(self, why: str = "") -> None:
        self.ended += 1


def places() -> tuple[TrainerRanks, list[Rank]]:
    members = [Rank("trainer"), Rank("trainer1")]
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
    members[1].die("trainer1 was killed")
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
        members[0].die("trainer was killed")
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
