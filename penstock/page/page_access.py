"""Decides which requests the page's server answers. Every request passes here first.

- Only GET and HEAD are answered: there is nothing to change.
- Host and Origin must be the server's own (`http_server.guard`).
- `/api` and `/metrics` need the token. The page itself holds nothing of a run, and needs none.
- A browser may load nothing from elsewhere, and interprets no text as markup (`SECURITY_HEADERS`).
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.http_server.guard import Guard, Refusal, bearer_token, guard_for
from penstock.page.json_answer import answer
from penstock.page.query_values import Refused

TOKEN_HEADER = "X-Penstock-Token"
"""Carries the token, since notebook proxies consume `Authorization`."""
METHODS = ("GET", "HEAD")
NEED_TOKEN = ("/api", "/metrics")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAccess:
    """Holds the host names that the server answers to, and the token that requests must bring."""

    token: str
    guard: Guard

    def refusal(self, request: web.Request) -> Refusal | None:
        if request.method not in METHODS:
            return Refusal(405, f"only {' and '.join(METHODS)} are answered", "read_only")
        if refusal := self.guard.refusal(request):
            return refusal
        if needs_token(request.path) and not self._has_token(request):
            return Refusal(
                401,
                "the token is missing or wrong: open the printed address, which ends in #token=…",
                "wrong_token",
            )
        return None

    def _has_token(self, request: web.Request) -> bool:
        given = request.headers.get(TOKEN_HEADER) or bearer_token(request)
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self.token.encode())


def make_access(token: str, listening: str, allowed: tuple[str, ...] = ()) -> PageAccess:
    advice = (
        "open the printed address, or name the host with --allow-host (of a run: observe.dashboard_hosts)"
    )
    return PageAccess(token=token, guard=guard_for(listening, allowed=allowed, advice=advice))


def needs_token(path: str) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in NEED_TOKEN)


def guard(access: PageAccess) -> Middleware:
    """Make middleware that keeps refused requests from every handler and turns errors into JSON answers."""

    @web.middleware
    async def check_access(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = access.refusal(request)
        if refusal is not None:
            refused = answer({"error": refusal.reason}, status=refusal.status)
            refused.force_close()
            return refused
        try:
            return await handler(request)
        except Refused as error:
            return answer({"error": str(error)}, status=error.status)
        except web.HTTPException:
            raise
        except Exception as error:
            logging.getLogger(__name__).exception("%s failed", request.path)
            return answer({"error": f"the server failed: {type(error).__name__}"}, status=500)

    return check_access


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the security headers in `on_response_prepare`, so that streamed answers have them too."""
    response.headers.update(SECURITY_HEADERS)
