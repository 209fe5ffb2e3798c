"""Doors on the loopback: who comes through, who sees the file, and what is said of those who don't."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.orchestration.launchers.reach_calls import Door, Reach
from penstock.worker import reach
from penstock.worker.reach import close_door, look, open_door

HOST = "127.0.0.1"


def looked_at(written: str = "", **changed: object) -> Reach:
    """What somebody finds at a door, of which some fields are told wrongly."""

    async def main() -> Reach:
        door, server = await open_door(HOST, written)
        try:
            return await look(msgspec.structs.replace(door, **changed))
        finally:
            close_door(door, server)
            await server.wait_closed()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "LATE_S", 0.0)


def test_one_who_comes_through_and_sees_the_file(tmp_path: Path) -> None:
    found = looked_at(str(tmp_path))
    assert (found.connects, found.why, found.sees) == (True, "", True)
    assert list(tmp_path.iterdir()) == []  # the file went with the door


def test_one_without_the_disk(tmp_path: Path) -> None:
    found = looked_at(str(tmp_path), folder=str(tmp_path / "elsewhere"))
    assert (found.connects, found.sees) == (True, False)


def test_one_whose_way_is_shut() -> None:
    found = looked_at(port=1)
    assert (found.connects, found.why, found.sees) == (False, "Connection refused", False)


def test_whoever_else_listens_there_is_not_taken_for_the_trainer(tmp_path: Path) -> None:
    found = looked_at(str(tmp_path), mark="another")
    assert (found.connects, found.why, found.sees) == (False, "somebody else answers there", False)


def test_a_folder_that_cannot_be_written_is_one_that_nobody_sees(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def main() -> Door:
        door, server = await open_door(HOST, str(tmp_path / "file" / "below"))
        close_door(door, server)
        await server.wait_closed()
        return door

    assert asyncio.run(main()).file == ""
