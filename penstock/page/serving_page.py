"""Serves the page of some runs on a socket that is already bound."""

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from penstock.http_server.web_server import HttpServer
from penstock.observe.reading.run_reading import RunReading
from penstock.page.dashboard_app import make_app
from penstock.page.open_runs import OpenRuns
from penstock.page.page_access import make_access

CLOSING_S = 1.0
"""Seconds to wait at the end before the streams of open pages are cut off."""


@contextlib.asynccontextmanager
async def served_page(
    readings: Sequence[RunReading],
    listening: socket.socket,
    *,
    token: str,
    allow_hosts: tuple[str, ...] = (),
) -> AsyncIterator[OpenRuns]:
    """Serve the page of these runs while inside."""
    runs = OpenRuns(readings)
    access = make_access(token, str(listening.getsockname()[0]), allow_hosts)
    server = HttpServer(make_app(runs, access), closing_s=CLOSING_S)
    try:
        await server.open(listening)
        yield runs
    finally:
        await server.close()
