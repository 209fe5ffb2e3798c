"""Opens the connections between a controller, which listens, and its workers, which connect.

Addresses are `unix:/path/to/socket` or `tcp:host:port`. Both sides prove that they know the run's token
before any other message (`handshake`); a connection that does not is closed.
"""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address

from penstock.channel import handshake
from penstock.channel.connection import Channel
from penstock.errors import ConfigError, PenstockError

PRIVATE_FOLDER_PREFIX = "penstock-"
"""Prefix of the name of a launcher's private folder, which holds its Unix socket."""
GREETING_S, MAX_GREETINGS = 5.0, 64
"""How long a connection may take to prove who it is, and how many may be doing so at once."""
ACCEPTED_AT_ONCE, MAX_QUEUED = 4, 128
"""For TCP: how many connections are accepted in a turn of the event loop, and how many queue in the kernel. Each
accepted connection is an open file, and it takes some turns until an older one has made way for it."""
ANSWER_S = 30.0
"""How long a worker waits for an answer to its greeting."""
TRIES = 5
"""How often a worker tries to connect. A controller that is busy, or flooded by strangers, may close a
connection before the worker has proved itself."""
ENOUGH = 65_536


def incarnation_name(name: str, incarnation: int) -> str:
    """Return the name by which one process of a worker connects. It differs between incarnations, so a process
    that was given up can't replace its successor."""
    return f"{name}.{incarnation}"


def host_and_port(text: str, what: str) -> tuple[str, int]:
    """Split `HOST:PORT`. `what` names the value in the error."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{what} must be HOST:PORT, got {text!r}")
    return host, int(port)


async def connect(address: str, name: str, token: str) -> Channel:
    """Connect as a worker of this name to a controller that has proved that it knows the token too. Raise
    `UserError` if one of them does not, `PenstockError` if another program listens."""
    for _ in range(TRIES):
        reader, writer = await _open(address)
        try:
            async with asyncio.timeout(ANSWER_S):
                await handshake.introduce(reader, writer, name=name, token=token)
            return Channel(reader, writer)
        except handshake.NO_GREETING:
            writer.close()
        except BaseException:
            writer.close()
            raise
    raise PenstockError(
        f"what listens at {address.partition(':')[2]} closed {TRIES} connections, or left them unanswered, before "
        "it had proved that it knows the run's token: it is no controller, or one of another version; "
        f"{handshake.SAME_VERSION}"
    )


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return await asyncio.open_unix_connection(rest)
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        return await asyncio.open_connection(host, int(port))
    raise ConfigError(f"an address must start with unix: or tcp:, got {address!r}")


class Listener:
    """Accepts workers on a Unix socket or TCP and hands each connection over by its name. `accept` returns
    whether the worker is expected; otherwise the connection is closed."""

    def __init__(self, address: str, token: str, accept: Callable[[str, Channel], bool]) -> None:
        if not token:
            raise ConfigError(
                "workers are let in with a token, got an empty one; make one with secrets.token_hex(16)"
            )
        self.address = address
        self._token = token
        self._accept = accept
        self._server: asyncio.Server | None = None
        self._greetings: list[asyncio.Timeout] = []
        """Time limits of connections that have not proved who they are, oldest first."""

    async def start(self) -> None:
        allow_many_connections()
        kind, _, rest = self.address.partition(":")
        if kind == "unix":
            self._server = await asyncio.start_unix_server(self._greet, rest)
        else:
            host, _, port = rest.rpartition(":")
            self._server = await asyncio.start_server(self._greet, host, int(port), backlog=ACCEPTED_AT_ONCE)
            for one in self._server.sockets:  # asyncio takes one number for accepting and queueing
                with socket.fromfd(one.fileno(), one.family, one.type) as listening:
                    listening.listen(MAX_QUEUED)
            bound = self._server.sockets[0].getsockname()
            self.address = f"tcp:{bound[0]}:{bound[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_taken = False
        try:
            async with self._place():
                name = await handshake.meet(reader, writer, token=self._token)
            is_taken = name is not None and self._accept(name, Channel(reader, writer))
        except (*handshake.NO_GREETING, asyncio.CancelledError):
            pass  # the end of the run cancels this task, which no caller awaits, and asyncio would log the error
        finally:
            if not is_taken:
                writer.close()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Take one of the greeting slots. If all are taken, the connection that has waited longest is closed."""
        if len(self._greetings) >= MAX_GREETINGS:
            oldest = self._greetings.pop(0)
            if not oldest.expired():  # an expired one ends by itself
                oldest.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(GREETING_S) as limit:
            self._greetings.append(limit)
            try:
                yield
            finally:
                if limit in self._greetings:
                    self._greetings.remove(limit)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def allow_many_connections() -> None:
    """Raise the limit of open files as far as allowed and useful, since every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
