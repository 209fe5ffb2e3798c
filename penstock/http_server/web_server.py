"""Serves an aiohttp application on a port, and closes connections that do not send a request in time.

A connection has `HEADER_S` to send the headers of its first request, and as long for each further one, from its
first byte on. There is no such limit between two requests, or while a body is sent or a long answer is read.
"""

import asyncio
import logging
import socket
from typing import Any

from aiohttp import StreamReader, web

HEADER_S = 10.0
NO_REQUEST = "HttpProcessingError"
"""The name of aiohttp's error for data that it could not parse."""


class Connection(web.RequestHandler):
    """Handles one client's connection. The middleware of `HttpServer` calls `begin` when a request has arrived
    and `end` when it is answered."""

    __slots__ = ("_body", "_headers_due", "_is_answering")

    def __init__(self, manager: web.Server, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._headers_due: asyncio.TimerHandle | None = None
        self._is_answering = False
        self._body: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Start the wait for headers when this data may be part of a request. aiohttp also calls this without
        data, to look again at what has arrived. A complete request begins in the next turn of the event loop,
        which ends the wait."""
        may_be_half = (
            data
            and self._headers_due is None
            and not self._is_answering
            and (self._body is None or self._body.is_eof())
        )
        super().data_received(data)
        if may_be_half:
            self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._have_headers()
        super().connection_lost(exc)

    def begin(self, request: web.Request) -> None:
        self._have_headers()
        self._is_answering = True
        self._body = request.content

    def end(self) -> None:
        self._is_answering = False

    def _await_headers(self) -> None:
        self._headers_due = asyncio.get_running_loop().call_later(HEADER_S, self._give_up)

    def _give_up(self) -> None:
        """Close the connection, unless headers are waiting: they arrived in time, while the event loop was
        blocked."""
        if not self._messages:
            self.force_close()

    def _have_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


@web.middleware
async def _note(request: web.Request, handler: Any) -> web.StreamResponse:
    connection = request.protocol
    assert isinstance(connection, Connection)
    connection.begin(request)
    try:
        answer: web.StreamResponse = await handler(request)
    finally:
        connection.end()
    return answer


class HttpServer:
    """Serves an application. Running answers may take `closing_s` at shutdown. A client that leaves cancels its
    request."""

    def __init__(self, app: web.Application, *, closing_s: float) -> None:
        app.middlewares.insert(0, _note)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=closing_s, access_log=None
        )
        self._server: asyncio.Server | None = None

    async def open(self, place: tuple[str, int] | socket.socket) -> None:
        """Listen on a host and port, or on a socket that is bound already."""
        await self._runner.setup()
        loop, manager = asyncio.get_running_loop(), self._runner.server
        assert manager is not None
        logger = request_logger()

        def connection() -> Connection:
            return Connection(manager, loop=loop, access_log=None, logger=logger)

        if isinstance(place, socket.socket):
            self._server = await loop.create_server(connection, sock=place)
        else:
            self._server = await loop.create_server(connection, *place, backlog=2048)

    @property
    def sockets(self) -> tuple[Any, ...]:
        return () if self._server is None else tuple(self._server.sockets)

    @property
    def port(self) -> int:
        return int(self.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()


def request_logger() -> logging.Logger:
    """Return a logger that drops aiohttp's tracebacks of data that is no request: a stranger could fill the disk
    with them. Our own errors are logged as usual."""
    logger = logging.getLogger("penstock.requests")
    if not logger.filters:
        logger.addFilter(is_own_fault)
    return logger


def is_own_fault(record: logging.LogRecord) -> bool:
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or all(base.__name__ != NO_REQUEST for base in kind.__mro__)
