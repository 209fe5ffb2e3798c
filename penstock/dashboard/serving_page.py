"""Serves the page of some runs on a socket that is bound already."""

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from penstock.dashboard.dashboard_app import make_app
from penstock.dashboard.doors import make_doors
from penstock.dashboard.open_runs import OpenRuns
from penstock.observe.reading.run_reading import RunReading
from penstock.observe.refused_requests import request_logger

CLOSING_S = 1.0
"""Streams of open pages are cut off at the end."""


@contextlib.asynccontextmanager
async def served_page(
    readings: Sequence[RunReading],
    listening: socket.socket,
    *,
    token: str,
    allow_hosts: tuple[str, ...] = (),
) -> AsyncIterator[OpenRuns]:
    """While inside, the page of these runs is there."""
    runs = OpenRuns(readings)
    doors = make_doors(token, str(listening.getsockname()[0]), allow_hosts)
    runner = web.AppRunner(
        make_app(runs, doors),
        handler_cancellation=True,
        shutdown_timeout=CLOSING_S,
        access_log=None,
        logger=request_logger(),
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        yield runs
    finally:
        await runner.cleanup()
