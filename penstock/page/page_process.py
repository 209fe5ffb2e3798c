"""The page of a run that goes on: `python -m penstock.page.page_process FD`, when somebody first opens it.

Its settings are the first line of its input, and the socket is handed down as a file descriptor, where connections
wait already. The input ends with the run; the page stays as long as somebody has it open."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import msgspec

from penstock.observe.reading.run_reading import RunReading
from penstock.page.open_runs import OpenRuns
from penstock.page.serving_page import served_page

NICENESS = 10
LINGER_S = 20.0
"""How long the page waits for somebody to open it again, after the run."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the run says."""

    folder: str
    token: str
    allow_hosts: tuple[str, ...] = ()


async def serve(listening: socket.socket, settings: Settings) -> None:
    reading = RunReading(Path(settings.folder))
    async with served_page(
        [reading], listening, token=settings.token, allow_hosts=settings.allow_hosts
    ) as runs:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        await nobody_looks(runs, LINGER_S)


async def nobody_looks(runs: OpenRuns, linger_s: float) -> None:
    """Until no page was open for so long."""
    while True:
        await runs.unwatched.wait()
        try:
            async with asyncio.timeout(linger_s):
                await runs.watched.wait()
        except TimeoutError:
            return


def main(arguments: list[str]) -> None:
    os.setsid()  # Ctrl-C in the terminal is for the run
    os.nice(NICENESS)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    with socket.socket(fileno=int(arguments[0])) as listening:
        asyncio.run(serve(listening, settings))


if __name__ == "__main__":
    main(sys.argv[1:])
