"""Where a controller listens and how a worker reaches it.

Addresses are `unix:/path/to/socket` or `tcp:host:port`. A worker's first frame is a `Hello` with its
name and the token that it was started with; a connection without the right token is closed unread.
"""

import asyncio
import hmac
from collections.abc import Callable

import msgspec

from penstock.channel.connection import Channel
from penstock.errors import ConfigError

PRIVATE_FOLDER_PREFIX = "penstock-"
"""How the name of a launcher's private folder begins; its Unix socket lies there."""
GREETING_S = 30.0
"""How long a connection may take to say who it is."""


class Hello(msgspec.Struct, frozen=True):
    name: str
    """As `incarnation_name` gives it."""
    token: str


def incarnation_name(name: str, incarnation: int) -> str:
    """Under which one process of a worker arrives: a process that was given up can't take its successor's place."""
    return f"{name}.{incarnation}"


def host_and_port(text: str, what: str) -> tuple[str, int]:
    """Of `HOST:PORT`; `what` it is, for the error."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{what} must be HOST:PORT, got {text!r}")
    return host, int(port)


async def connect(address: str, hello: Hello) -> Channel:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(rest)
    elif kind == "tcp":
        host, _, port = rest.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    else:
        raise ConfigError(f"an address must start with unix: or tcp:, got {address!r}")
    data = msgspec.msgpack.encode(hello)
    writer.write(len(data).to_bytes(4, "big") + data)
    return Channel(reader, writer)


class Listener:
    """Accepts workers on a Unix socket (or loopback TCP) and hands each connection over by its name. `accept`
    says whether somebody waits for it; otherwise it is closed."""

    def __init__(self, address: str, token: str, accept: Callable[[str, Channel], bool]) -> None:
        if not token:
            raise ConfigError(
                "workers are let in with a token, got an empty one; make one with secrets.token_hex(16)"
            )
        self.address = address
        self._token = token
        self._accept = accept
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        kind, _, rest = self.address.partition(":")
        if kind == "unix":
            self._server = await asyncio.start_unix_server(self._greet, rest)
        else:
            host, _, port = rest.rpartition(":")
            self._server = await asyncio.start_server(self._greet, host, int(port))
            bound = self._server.sockets[0].getsockname()
            self.address = f"tcp:{bound[0]}:{bound[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                size = int.from_bytes(await reader.readexactly(4), "big")
                hello = msgspec.msgpack.decode(await reader.readexactly(min(size, 4096)), type=Hello)
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError, ValueError, RecursionError):
            writer.close()
            return
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            writer.close()
            return
        if not self._accept(hello.name, Channel(reader, writer)):
            writer.close()
