"""Serves the page of a run in progress: `python -m penstock.page.page_process FD`, started when the page is
first opened.

The first line of its input holds its settings. The socket is handed down as a file descriptor, on which
connections already wait. The input ends with the run; the page stays for as long as a browser has it open.
"""

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
"""How long the page waits after the run for a browser to open it again."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the settings that a run passes to its page."""

    folder: str
    token: str
    allow_hosts: tuple[str, ...] = ()


async def serve(listening: socket.socket, settings: Settings) -> None:
    reading = RunReading(Path(settings.folder))
    async with served_page(
        [reading], listening, token=settings.token, allow_hosts=settings.allow_hosts
    ) as runs:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        await wait_unwatched(runs, LINGER_S)


async def wait_unwatched(runs: OpenRuns, linger_s: float) -> None:
    """Wait until no page has been open for `linger_s`."""
    while True:
        await runs.unwatched.wait()
        try:
            async with asyncio.timeout(linger_s):
                await runs.watched.wait()
        except TimeoutError:
            return


def main(arguments: list[str]) -> None:
    os.setsid()  # Ctrl-C in the terminal must reach the run alone
    os.nice(NICENESS)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    with socket.socket(fileno=int(arguments[0])) as listening:
        asyncio.run(serve(listening, settings))


if __name__ == "__main__":
    main(sys.argv[1:])
