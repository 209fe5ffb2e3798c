"""A worker's part in finding out who reaches whom (`penstock.orchestration.launchers.reach_calls`)."""

import asyncio
import contextlib
import os
import secrets
import socket
from pathlib import Path

from penstock.channel import Channel
from penstock.orchestration.launchers.reach_calls import (
    DOOR_S,
    LOOK_AT_DOOR,
    LOOK_S,
    OPEN_DOOR,
    Door,
    DoorWanted,
    Reach,
)
from penstock.sync.interface import address_of

LATE_S, LOOK_AGAIN_S = 2.0, 0.05
"""A disk of another machine may show a new file late."""


def serve_reach(channel: Channel) -> None:
    """For whoever asks over this channel."""
    closing: set[asyncio.Task[None]] = set()

    async def open_it(wanted: DoorWanted) -> Door:
        host = address_of(wanted.interface or channel.local_host)
        door, server = await open_door(host, wanted.folder)
        task = asyncio.get_running_loop().create_task(_close_later(door, server))
        closing.add(task)
        task.add_done_callback(closing.discard)
        return door

    channel.serve(OPEN_DOOR, open_it)
    channel.serve(LOOK_AT_DOOR, look)


async def open_door(host: str, folder: str = "") -> tuple[Door, asyncio.Server]:
    mark = secrets.token_hex(16)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(mark.encode())
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, 0)
    file = _leave_file(folder, mark) if folder else ""
    port = server.sockets[0].getsockname()[1]
    return Door(host=host, port=port, folder=folder, file=file, mark=mark), server


def _leave_file(folder: str, mark: str) -> str:
    """Its name; "" where it can't be written."""
    path = Path(folder) / f".reach-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mark)
    except OSError:
        return ""
    return path.name


async def _close_later(door: Door, server: asyncio.Server) -> None:
    try:
        await asyncio.sleep(DOOR_S)
    finally:
        close_door(door, server)


def close_door(door: Door, server: asyncio.Server) -> None:
    server.close()
    if door.file:
        (Path(door.folder) / door.file).unlink(missing_ok=True)


async def look(door: Door) -> Reach:
    why, sees = await asyncio.gather(_why_not_through(door), _sees(door))
    return Reach(machine=socket.gethostname(), connects=not why, why=why, sees=sees)


async def _why_not_through(door: Door) -> str:
    """ "" where it came through."""
    try:
        async with asyncio.timeout(LOOK_S):
            reader, writer = await asyncio.open_connection(door.host, door.port)
            try:
                mark = await reader.read(-1)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer within {LOOK_S:.0f} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
    return "" if mark.decode(errors="replace") == door.mark else "somebody else answers there"


async def _sees(door: Door) -> bool:
    if not door.file:
        return False
    until = asyncio.get_running_loop().time() + LATE_S
    while True:
        with contextlib.suppress(OSError):
            if (Path(door.folder) / door.file).read_text() == door.mark:
                return True
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(LOOK_AGAIN_S)
