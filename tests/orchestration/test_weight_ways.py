"""Which transport `auto` is, from what each engine has found at the trainer's door."""

import asyncio
from collections.abc import Mapping

import pytest

from penstock.channel import Method
from penstock.errors import ChannelClosed, UserError
from penstock.orchestration.launchers.config import LauncherConfig
from penstock.orchestration.launchers.reach_calls import LOOK_AT_DOOR, OPEN_DOOR, Door, DoorWanted, Reach
from penstock.orchestration.virtual_time import run_in_virtual_time
from penstock.orchestration.weight_ways import WeightWays, choose_way, sync_section
from penstock.sync.config import SyncConfig

DOOR = Door(host="10.0.0.1", port=4000, folder="/runs/a", file=".reach", mark="m")
NEAR = Reach(machine="node1", connects=True, sees=True)
WITHOUT_DISK = Reach(machine="node2", connects=True, sees=False)
WITHOUT_WAY = Reach(machine="node3", connects=False, why="Connection refused", sees=True)
ASTRAY = Reach(machine="node4", connects=False, why="no answer", sees=False)


class FakeChannel:
    """To a worker: the trainer's opens doors, an engine's has found this."""

    def __init__(self, reach: Reach | None = None) -> None:
        self.reach = reach
        self.asked: list[str] = []
        self.closed = self.closes_when_asked = False
        self.stay = asyncio.Event()

    async def wait_closed(self) -> None:
        await self.stay.wait()

    async def call(self, method: Method, request: object) -> object:  # type: ignore[type-arg]
        self.closed = self.closed or self.closes_when_asked
        if self.closed:
            raise ChannelClosed("gone")
        self.asked.append(method.name)
        if method.name == OPEN_DOOR.name:
            assert request == DoorWanted(folder="/runs/a")
            return DOOR
        assert method.name == LOOK_AT_DOOR.name
        assert request == DOOR
        return self.reach


def ways(preferred: str = "http", first: tuple[str, ...] = ("engine0", "engine1")) -> WeightWays:
    return WeightWays(preferred, first, wanted=DoorWanted(folder="/runs/a"))


@pytest.mark.parametrize(
    ("preferred", "reaches", "way"),
    [
        ("http", {"engine0": NEAR, "engine1": WITHOUT_DISK}, "http"),
        ("http", {"engine0": NEAR, "engine1": WITHOUT_WAY}, "filesystem"),
        ("collective", {"engine0": NEAR, "engine1": WITHOUT_DISK}, "collective"),
        ("collective", {"engine0": NEAR, "engine1": WITHOUT_WAY}, "filesystem"),
        ("filesystem", {"engine0": NEAR, "engine1": WITHOUT_WAY}, "filesystem"),
        ("filesystem", {"engine0": NEAR, "engine1": WITHOUT_DISK}, "http"),
    ],
)
def test_a_transport_must_reach_all(preferred: str, reaches: Mapping[str, Reach], way: str) -> None:
    assert choose_way(preferred, reaches, DOOR)[0] == way


def test_the_reason_names_who_did_not_reach_what_was_preferred() -> None:
    why = choose_way("http", {"engine0": NEAR, "engine1": WITHOUT_WAY}, DOOR)[1]
    assert why == (
        "engine1 on node3 can't connect to the trainer at 10.0.0.1 (Connection refused); every engine sees /runs/a"
    )
    assert choose_way("http", {"engine0": NEAR}, DOOR)[1] == "every engine reaches the trainer at 10.0.0.1"


@pytest.mark.parametrize(
    ("reaches", "who"),
    [
        (
            {"engine0": NEAR, "engine1": ASTRAY},
            r"engine1 on node4 can't connect to the trainer at 10\.0\.0\.1 \(no answer\) and does not see /runs/a",
        ),
        ({"engine0": WITHOUT_DISK, "engine1": WITHOUT_WAY}, "engine0 on node2 does not see /runs/a"),
    ],
)
def test_without_a_way_to_all_there_is_one_sentence(reaches: Mapping[str, Reach], who: str) -> None:
    with pytest.raises(
        UserError, match=rf"no transport brings weights to every engine: {who}; open the trainer's"
    ):
        choose_way("http", reaches, DOOR)


def test_the_trainer_waits_for_every_first_engine() -> None:
    async def main() -> str:
        both, trainer = ways(), FakeChannel()
        settling = asyncio.ensure_future(both.settle(lambda: trainer))  # type: ignore[arg-type, return-value]
        await both.look("engine0", FakeChannel(NEAR))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not settling.done()
        await both.look("engine1", FakeChannel(WITHOUT_WAY))  # type: ignore[arg-type]
        return await settling

    assert asyncio.run(main()) == "filesystem"


@pytest.mark.parametrize("dies", ["before it opens a door", "before an engine has looked"])
def test_a_trainer_that_dies_before_the_transport_is_known_is_followed_by_another(dies: str) -> None:
    """A door that closed with its process does not count as one that can't be reached."""

    async def main() -> str:
        alone, first, second = ways(first=("engine0",)), FakeChannel(), FakeChannel()
        engine = FakeChannel(WITHOUT_WAY)
        first.closes_when_asked = dies == "before it opens a door"
        trainers = [first]
        settling = asyncio.ensure_future(alone.settle(lambda: trainers[-1]))  # type: ignore[arg-type, return-value]
        await asyncio.sleep(0)
        looking = asyncio.ensure_future(alone.look("engine0", engine))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        first.closed = True
        first.stay.set()
        settling.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not looking.done()
        engine.reach = NEAR
        trainers.append(second)
        settling = asyncio.ensure_future(alone.settle(lambda: trainers[-1]))  # type: ignore[arg-type, return-value]
        await looking
        return await settling

    assert run_in_virtual_time(main()) == "http"


def test_the_transport_stays_when_the_trainer_dies_while_it_loads() -> None:
    async def main() -> tuple[str, str]:
        alone, trainer = ways(first=("engine0",)), FakeChannel()
        settling = asyncio.ensure_future(alone.settle(lambda: trainer))  # type: ignore[arg-type, return-value]
        await alone.look("engine0", FakeChannel(WITHOUT_WAY))  # type: ignore[arg-type]
        return await settling, await alone.settle(lambda: FakeChannel())  # type: ignore[arg-type, return-value]

    assert run_in_virtual_time(main()) == ("filesystem", "filesystem")


def test_a_newcomer_that_the_weights_cannot_reach_is_refused() -> None:
    async def main() -> None:
        alone, trainer = ways(first=("engine0",)), FakeChannel()
        settling = asyncio.ensure_future(alone.settle(lambda: trainer))  # type: ignore[arg-type, return-value]
        await alone.look("engine0", FakeChannel(NEAR))  # type: ignore[arg-type]
        assert await settling == "http"
        await alone.look("engine1", FakeChannel(WITHOUT_DISK))  # type: ignore[arg-type]
        with pytest.raises(
            UserError, match=r"weights travel by http, which engine2 needs too: engine2 on node3 can't"
        ):
            await alone.look("engine2", FakeChannel(WITHOUT_WAY))  # type: ignore[arg-type]
        trainer.closed = True
        newcomer = FakeChannel(WITHOUT_WAY)
        await alone.look("engine3", newcomer)  # type: ignore[arg-type]
        assert newcomer.asked == []  # there is nobody to reach now

    asyncio.run(main())


def test_a_trainer_of_this_machine_serves_where_others_may_come_in() -> None:
    sync = SyncConfig(transport="http")

    def interface(listen: str, kind: str = "local", sync: SyncConfig = sync) -> str:
        launcher = LauncherConfig(kind=kind, listen=listen, token_file="token")  # type: ignore[arg-type]
        return sync_section(sync, launcher).interface

    assert interface("10.1.2.3:7000") == "10.1.2.3"
    assert interface("127.0.0.1:7000") == ""
    assert interface("10.1.2.3:7000", kind="ray") == ""
    assert interface("10.1.2.3:7000", sync=SyncConfig(interface="eth0")) == "eth0"
    assert interface("10.1.2.3:7000", sync=SyncConfig(transport="collective")) == ""
