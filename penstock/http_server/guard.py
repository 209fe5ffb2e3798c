"""Checks every request to our HTTP servers before any route sees it.

- The Host header must be a name that the server is known by; its port is ignored (a tunnel uses another). This
  refuses a stranger's page that resolves its own name to this address (DNS rebinding).
- The Origin header, which browsers add to a page's requests to other sites, must be the server's own.
- A POST must have the content type of JSON: no page can send that to another site without permission.
"""

import functools
import re
import socket
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from aiohttp import web

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
EVERYWHERE = ("0.0.0.0", "[::]")
CONTAINERS = ("host.docker.internal", "host.containers.internal")
"""Names by which containers reach the machine that they run on."""
JSON = "application/json"
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a request is refused."""

    status: int
    reason: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Checks requests. `hosts` are the names that the server answers to; `advice` tells clients of another name
    what to do."""

    hosts: frozenset[str]
    any_address: bool
    """Whether to accept every IP address as Host: the server listens on all of them, and DNS rebinding needs a
    name."""
    advice: str

    def refusal(self, request: web.Request) -> Refusal | None:
        headers = request.headers
        host = headers.get("Host", "")
        if not self._knows(host):
            return Refusal(403, f"the Host {host[:100]!r} is not known here: {self.advice}", "unknown_host")
        origin = headers.get("Origin")
        if origin is not None and not self._is_own(origin, host):
            return Refusal(
                403,
                f"requests of web pages from {origin[:100]!r} are not answered: {self.advice}",
                "unknown_origin",
            )
        if request.method != "POST" or (kind := headers.get("Content-Type", "none")) == JSON:
            return None
        if request.content_type == JSON:  # with a charset, or in capitals
            return None
        return Refusal(
            415,
            f"a POST must say that it is JSON, also without a body: send the header `Content-Type: {JSON}`, got "
            f"{kind[:100]!r}",
            "not_json",
        )

    def _knows(self, host: str) -> bool:
        name = host_name(host)
        return name is not None and (name in self.hosts or (self.any_address and _is_address(name)))

    def _is_own(self, origin: str, host: str) -> bool:
        """Return whether the page is this server's: its host is the requested one, or another of `hosts` beyond
        loopback, such as a proxy's."""
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https"):
            return False
        return place.lower() == host.lower() or host_name(place) in self.hosts - set(LOOPBACK)


def guard_for(listening: str, *, allowed: tuple[str, ...] = (), advice: str) -> Guard:
    """Make the guard of a server. Loopback names are always allowed, since tunnels use them, and so is the
    address listened on. If the server listens on all addresses, this machine's name, every IP address and the
    names that containers use are allowed too."""
    own = f"[{listening}]" if ":" in listening else listening
    everywhere = own in EVERYWHERE
    names = {*LOOPBACK, *((socket.gethostname(), *CONTAINERS) if everywhere else (own,)), *allowed}
    return Guard(
        hosts=frozenset(name.lower().rstrip(".") for name in names), any_address=everywhere, advice=advice
    )


def bearer_token(request: web.Request) -> str:
    """Return what follows `Bearer` in the Authorization header, or "" without such a header."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@functools.lru_cache(maxsize=256)
def host_name(header: str) -> str | None:
    """Return the name in a Host header, without its port and in lower case, or None if it is invalid."""
    found = HOST.fullmatch(header.lower())
    if found is None:
        return None
    name = found["name"]
    return _shortest(name) if name.startswith("[") else name.rstrip(".")


def _shortest(name: str) -> str | None:
    try:
        return f"[{IPv6Address(name[1:-1])}]"
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
