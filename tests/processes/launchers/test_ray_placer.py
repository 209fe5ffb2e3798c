"""Who shares a place with whom, and for how long. What Ray does is tested on real nodes (`tests/ray_live`)."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.processes.launchers.ray_connection import AgentEnd
from penstock.processes.launchers.ray_placer import RayAgent, RayPlacer


class FakeGroup:
    """A placement group that has room, or waits for it."""

    def __init__(self, num_bundles: int, avoided: Sequence[str], *, has_room: bool) -> None:
        self.num_bundles = num_bundles
        self.avoided = tuple(avoided)
        self.has_room = has_room
        self.is_removed = False

    def wait(self, seconds: float) -> bool:
        return self.has_room


class PlacerWithoutRay(RayPlacer):
    """What the placer asks of Ray, noted. Bundle N of a group is on node N."""

    def __init__(self, *, has_room: bool = True, **options: Any) -> None:
        super().__init__(resources=lambda name, threads: {"CPU": 1.0}, wait_s=0.0, **options)
        self.made: list[FakeGroup] = []
        self.has_room = has_room

    def _ask(self, bundle: Mapping[str, float], count: int, avoided: Sequence[str]) -> FakeGroup:
        self.made.append(FakeGroup(count, avoided, has_room=self.has_room))
        return self.made[-1]

    def _start(self, group: Any, index: int, *rest: object) -> tuple[None, None, str]:
        return None, None, f"node{index}"

    def _remove(self, members: tuple[str, ...]) -> None:
        group = self._groups.pop(members, None)
        if group is not None:
            group.is_removed = True

    def _what_is_missing(self, members: Sequence[str], bundle: Mapping[str, float], waited_s: float) -> str:
        return f"{members[0]} needs more"

    async def put(self, name: str, incarnation: int = 1) -> RayAgent:
        return await self.place(name, incarnation, address="tcp:h:1", token="t", threads=1)


def test_ranks_share_a_group_until_a_node_of_it_does_not_answer() -> None:
    async def main() -> None:
        placer = PlacerWithoutRay(together=[("trainer", "trainer1")])
        _, second = await asyncio.gather(placer.put("trainer"), placer.put("trainer1"))
        await placer.put("engine0")
        assert [group.num_bundles for group in placer.made] == [2, 1]
        await placer.put("trainer", 2)  # its process died, and its place is still there
        assert len(placer.made) == 2
        second.avoid()
        await asyncio.gather(placer.put("trainer", 3), placer.put("trainer1", 2))
        assert [group.avoided for group in placer.made] == [(), (), ("node1",)]
        assert [group.is_removed for group in placer.made] == [True, False, False]

    asyncio.run(main())


def test_the_first_workers_do_not_wait_for_ever() -> None:
    placer = PlacerWithoutRay(has_room=False, joins=lambda name: name == "engine1")
    with pytest.raises(UserError, match="engine0 needs more"):
        asyncio.run(placer.put("engine0"))


def test_one_that_joins_waits_and_leaves_no_group_when_it_is_given_up() -> None:
    async def main() -> list[FakeGroup]:
        placer = PlacerWithoutRay(has_room=False, joins=lambda name: name == "engine1")
        joining = asyncio.create_task(placer.put("engine1"))
        while not placer.made:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        assert joining.cancelled()
        return placer.made

    assert [group.is_removed for group in asyncio.run(main())] == [True]


def test_who_no_longer_waits_for_an_agent_leaves_its_future_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ModuleType("ray")
    ray.__dict__["exceptions"] = SimpleNamespace(RayError=KeyError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    given_up: Future[AgentEnd] = Future()
    cut_off: Future[AgentEnd] = Future()

    def place(running: "Future[AgentEnd]") -> RayAgent:
        return RayAgent(None, running, lambda: None, lambda: None)

    async def main() -> str:
        waiting = asyncio.create_task(place(given_up).failed())
        why = asyncio.create_task(place(cut_off).failed())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        cut_off.set_exception(ConnectionError("the head is gone\nmore"))
        return await why

    assert asyncio.run(main()) == "Ray could not start it: the head is gone"
    given_up.set_result(AgentEnd(host="node1", code=0, last_lines=""))  # by a thread of Ray's, after the run
    assert given_up.done()
