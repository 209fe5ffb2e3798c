import asyncio

from penstock.engines.embedded.staged_updates import StagedUpdates
from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged
from tests.engines.contract import update_to
from tests.engines.embedded.tiny import NoWeights


class Diary(NoWeights):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage(self, update: WeightUpdate) -> Staged:
        self.lines.append(f"stage {update.version}")
        return Staged(update)

    def drop(self, staged: Staged) -> None:
        self.lines.append(f"drop {staged.update.version}")


def test_an_update_is_fetched_once_and_another_takes_its_place() -> None:
    async def main() -> None:
        receiver = Diary()
        updates = StagedUpdates(receiver)
        await updates.keep(update_to(1))
        fetched = await updates.fetch(update_to(1))
        assert (fetched.staged.update.version, fetched.stage_s) == (1, 0.0)
        assert receiver.lines == ["stage 1"]
        await updates.keep(update_to(2))
        await updates.keep(update_to(3))
        assert (await updates.fetch(update_to(4))).staged.update.version == 4
        assert receiver.lines[1:] == ["stage 2", "drop 2", "stage 3", "drop 3", "stage 4"]

    asyncio.run(main())


def test_one_that_is_sent_is_fetched_again() -> None:
    async def main() -> None:
        receiver = Diary()
        updates = StagedUpdates(receiver)
        for _ in range(2):
            await updates.keep(update_to(1, sends=True))
        await updates.fetch(update_to(1, sends=True))
        assert receiver.lines == ["stage 1", "drop 1", "stage 1"]

    asyncio.run(main())


def test_what_nobody_loaded_is_dropped_at_the_end() -> None:
    async def main() -> None:
        receiver = Diary()
        updates = StagedUpdates(receiver)
        await updates.keep(update_to(1))
        updates.close()
        updates.close()
        assert receiver.lines == ["stage 1", "drop 1"]

    asyncio.run(main())
