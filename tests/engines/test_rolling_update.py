"""Waves of loads in virtual time."""

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.engines.rolling_update import Answer, Member, num_at_once, roll
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import PenstockError
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import Payload, UpdateReceipt, WeightUpdate
from tests.engines.contract import update_to

LOAD_S = 0.1


class Loading(ScriptedEngine):
    """Loads for `load_s`, and writes down how many of its pool do so at once."""

    def __init__(
        self,
        number: int,
        at_once: list[int],
        *,
        load_s: float = LOAD_S,
        fails: bool = False,
        has_room: bool = False,
    ) -> None:
        super().__init__(lambda request: [1], name=f"engine{number}")
        self._at_once, self._load_s, self._fails = at_once, load_s, fails
        self._has_room = has_room
        self.began_s = self.ended_s = -1.0
        self.staged_s = -1.0

    async def stage(self, update: WeightUpdate) -> None:
        self.staged_s = asyncio.get_running_loop().time()
        await asyncio.sleep(self._load_s)

    async def update(self, update: WeightUpdate, interrupt: Any = "inflight") -> UpdateReceipt:
        self.began_s = asyncio.get_running_loop().time()
        self._at_once.append(self._at_once[-1] + 1 if self._at_once else 1)
        try:
            await asyncio.sleep(self._load_s)
        finally:
            self._at_once.append(self._at_once[-1] - 1)
        if self._fails:
            raise PenstockError(f"{self.name} can't load")
        self.ended_s = asyncio.get_running_loop().time()
        receipt = await super().update(update, "inflight")
        return msgspec.structs.replace(receipt, stage_s=self._load_s if self._has_room else 0.0)


def rolled(
    engines: list[Loading], *, at_once: int, lost: int = 0, **options: Any
) -> tuple[list[Answer], list[Member]]:
    """The answers, where the first `lost` engines serve nothing before."""
    members = [Member(each.name, each, is_lost=at < lost) for at, each in enumerate(engines)]
    return run_in_virtual_time(roll(members, update_to(1, **options), "drain", at_once=at_once)), members


@pytest.mark.parametrize(
    ("num_serving", "share", "expected"),
    [
        (0, 0.25, 1),
        (1, 0.25, 1),
        (1, 1.0, 1),
        (2, 0.25, 1),
        (2, 1.0, 1),
        (3, 0.25, 1),
        (5, 0.25, 2),
        (8, 0.25, 2),
        (32, 0.25, 8),
        (32, 0.01, 1),
        (32, 1.0, 31),
    ],
)
def test_a_share_loads_at_once_at_least_one_and_never_all(
    num_serving: int, share: float, expected: int
) -> None:
    assert num_at_once(num_serving, share) == expected


@pytest.mark.parametrize("payloads", [(), (Payload(num_bytes=4),)], ids=["in place", "staged"])
def test_32_engines_load_in_the_time_of_four(payloads: tuple[Payload, ...]) -> None:
    at_once: list[int] = []
    engines = [Loading(number, at_once) for number in range(32)]
    answers, members = rolled(engines, at_once=8, payloads=payloads)
    stage_s = LOAD_S if payloads else 0.0
    assert {each.staged_s for each in engines} == {0.0 if payloads else -1.0}
    assert max(each.ended_s for each in engines) == pytest.approx(stage_s + 4 * LOAD_S)
    assert max(at_once) == 8
    assert all(isinstance(answer, UpdateReceipt) for answer in answers)
    assert all(member.acknowledged["policy"].version == 1 for member in members)


def test_engines_that_staged_the_last_weights_stage_the_next_before_any_load() -> None:
    """Though these could be read in place, as the others do, which are asked nothing."""
    engines = [Loading(number, [], has_room=number < 3) for number in range(4)]
    members = [Member(each.name, each) for each in engines]

    async def main() -> None:
        await roll(members, update_to(1), "inflight", at_once=2)
        assert [each.staged_s for each in engines] == [-1.0] * 4
        start = asyncio.get_running_loop().time()
        await roll(members, update_to(2), "inflight", at_once=2)
        assert [each.staged_s for each in engines] == [start] * 3 + [-1.0]
        assert [each.began_s - start for each in engines] == pytest.approx([0.1, 0.1, 0.2, 0.2])
        await roll(members, update_to(3, selection="adapter", base=2), "inflight", at_once=2)
        await roll(members[:1], update_to(4), "inflight", at_once=1)
        assert [each.staged_s for each in engines] == [start] * 3 + [-1.0]

    run_in_virtual_time(main())


def test_a_slow_engine_holds_up_one_turn_alone() -> None:
    engines = [Loading(number, [], load_s=1.0 if number == 0 else LOAD_S) for number in range(9)]
    rolled(engines, at_once=2)
    assert [each.ended_s for each in engines] == pytest.approx([1.0, *(0.1 * n for n in range(1, 9))])


def test_engines_that_serve_nothing_wait_for_no_turn() -> None:
    engines = [Loading(number, []) for number in range(6)]
    _, members = rolled(engines, at_once=1, lost=4)
    assert [each.began_s for each in engines] == pytest.approx([0, 0, 0, 0, 0, 0.1])
    assert not any(member.is_lost for member in members)


def test_an_engine_that_fails_costs_the_others_nothing() -> None:
    engines = [Loading(number, [], fails=number == 1) for number in range(4)]
    answers, members = rolled(engines, at_once=2)
    assert [str(each) for each in answers if isinstance(each, PenstockError)] == ["engine1 can't load"]
    assert [each.version for each in engines] == [1, 0, 1, 1]
    assert ["policy" in member.acknowledged for member in members] == [True, False, True, True]


def test_one_that_is_cancelled_leaves_no_engine_loading_or_draining() -> None:
    at_once: list[int] = []
    members = [Member(str(number), Loading(number, at_once)) for number in range(8)]

    async def main() -> None:
        rolling = asyncio.create_task(roll(members, update_to(1), "drain", at_once=3))
        await asyncio.sleep(1.5 * LOAD_S)
        assert [member.is_draining for member in members] == [False] * 3 + [True] * 3 + [False] * 2
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling

    run_in_virtual_time(main())
    assert at_once[-1] == 0
    assert not any(member.is_draining for member in members)
    assert ["policy" in member.acknowledged for member in members] == [True] * 3 + [False] * 5
