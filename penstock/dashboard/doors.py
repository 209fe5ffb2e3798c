"""Who may ask the server what. Every request passes here first.

- Only GET and HEAD: there is nothing to change.
- The Host header must be a name that this server is known by, its port aside (a tunnel has another). A page of a
  stranger that resolves its own name to this address (DNS rebinding) is refused.
- `/api` and `/metrics` need the token. The page itself holds nothing of a run, and needs none.
- A browser may load nothing from elsewhere, and interprets no text as markup (`SECURITY_HEADERS`).
"""

import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv6Address

from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.dashboard.json_answer import answer
from penstock.dashboard.query_values import Refused

TOKEN_HEADER = "X-Penstock-Token"
"""Notebook proxies keep `Authorization` for themselves."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
METHODS = ("GET", "HEAD")
NEED_TOKEN = ("/api", "/metrics")
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """The names that the server answers to, and the token that whoever asks must bring."""

    token: str
    hosts: frozenset[str]

    def refusal(self, request: web.Request) -> Refusal | None:
        if request.method not in METHODS:
            return Refusal(405, f"only {' and '.join(METHODS)} are answered")
        name = host_name(request.headers.get("Host", ""))
        if name not in self.hosts:
            return Refusal(
                403,
                "this Host is not known here: open the printed address, or name the host with --allow-host",
            )
        if needs_token(request.path) and not self._has_token(request):
            return Refusal(
                401, "the token is missing or wrong: open the printed address, which ends in #token=…"
            )
        return None

    def _has_token(self, request: web.Request) -> bool:
        given = request.headers.get(TOKEN_HEADER) or request.headers.get("Authorization", "").removeprefix(
            "Bearer "
        )
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode())


def make_doors(token: str, listening: str, allowed: tuple[str, ...] = ()) -> Doors:
    """Loopback's names always: a tunnel brings them. The address listened on, unless it stands for all."""
    own = f"[{listening}]" if ":" in listening else listening
    everywhere = own in ("0.0.0.0", "[::]")
    names = {*LOOPBACK, *(() if everywhere else (own,)), *allowed}
    return Doors(token=token, hosts=frozenset(name.lower().rstrip(".") for name in names))


def host_name(header: str) -> str | None:
    """The name of a Host header without its port, in lower case; None if it is none."""
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


def needs_token(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in NEED_TOKEN)


def guard(doors: Doors) -> Middleware:
    """Middleware: what is refused reaches no handler, and every answer carries the security headers."""

    @web.middleware
    async def pass_doors(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = doors.refusal(request)
        if refusal is not None:
            return answer({"error": refusal.reason}, status=refusal.status)
        try:
            return await handler(request)
        except Refused as error:
            return answer({"error": str(error)}, status=error.status)
        except web.HTTPException:
            raise
        except Exception as error:
            logging.getLogger(__name__).exception("%s failed", request.path)
            return answer({"error": f"the server failed: {type(error).__name__}"}, status=500)

    return pass_doors


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """`on_response_prepare`: also of answers that stream."""
    response.headers.update(SECURITY_HEADERS)
