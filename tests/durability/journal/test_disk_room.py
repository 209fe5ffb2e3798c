"""A full disk is waited out by everybody who writes, and told once however many they are."""

import asyncio
import errno
import os

import pytest

from penstock.durability.journal.disk_room import DiskRoom
from penstock.planner.virtual_time import run_in_virtual_time


class Disk:
    """Refuses writes while it is full."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        self.is_full = True
        self.error = OSError(number, os.strerror(number))
        self.written: list[str] = []

    async def write(self, word: str) -> None:
        if self.is_full:
            raise self.error
        self.written.append(word)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_writers_wait_and_a_person_is_told_once(number: int) -> None:
    said: list[str] = []

    async def scene() -> None:
        disk, room = Disk(number), DiskRoom(say=said.append, retry_s=5)
        await room.wait()
        writers = [asyncio.create_task(room.patiently(lambda word=word: disk.write(word))) for word in "ab"]
        await asyncio.sleep(12)
        assert room.is_full
        bystander = asyncio.create_task(room.wait())
        disk.is_full = False
        await bystander
        assert asyncio.get_running_loop().time() == 15
        await asyncio.gather(*writers)
        assert sorted(disk.written) == ["a", "b"]
        assert not room.is_full

    run_in_virtual_time(scene())
    assert len(said) == 2
    assert said[0].startswith(
        "the disk is full: the run waits, and loses nothing; make room and it continues"
    )
    assert os.strerror(number) in said[0]
    assert said[1] == "the disk has room again: the run continues, and nothing was lost"


def test_when_the_run_ends_the_wait_ends_too() -> None:
    async def scene() -> None:
        disk, room = Disk(), DiskRoom(retry_s=1000)
        writing = asyncio.create_task(room.patiently(lambda: disk.write("a")))
        bystander = asyncio.create_task(room.wait())
        await asyncio.sleep(1)
        room.give_up()
        with pytest.raises(OSError, match="No space left"):
            await writing
        await bystander
        assert asyncio.get_running_loop().time() == 1

    run_in_virtual_time(scene())


def test_of_a_wait_that_is_cancelled_nobody_hears_that_there_is_room() -> None:
    said: list[str] = []

    async def scene() -> None:
        disk, room = Disk(), DiskRoom(say=said.append)
        writing = asyncio.create_task(room.patiently(lambda: disk.write("a")))
        await asyncio.sleep(1)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not room.is_full

    run_in_virtual_time(scene())
    (line,) = said
    assert line.startswith("the disk is full")


def test_any_other_error_is_not_waited_out() -> None:
    async def scene() -> None:
        room = DiskRoom()
        with pytest.raises(OSError, match="Input/output error"):
            await room.patiently(lambda: Disk(errno.EIO).write("a"))

    asyncio.run(scene())
