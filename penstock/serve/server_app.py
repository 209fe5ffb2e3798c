"""Builds the HTTP application: routes, access checks, and error responses."""

import hmac
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from penstock.http_server.guard import Guard, bearer_token
from penstock.serve.api_error import ApiError, as_api_error
from penstock.serve.bodies import BUDGET, BodyBudget, answer

MAX_BODY_BYTES = 64 * 2**20
"""The default limit of a body. A context of a million tokens takes 7 MB."""
OPEN_PATHS = ("/health",)
"""Paths that need no token, for load balancers."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    routes: Iterable[web.RouteDef], *, guard: Guard, token: str = "", bodies: BodyBudget | None = None
) -> web.Application:
    """Make the application with these routes. If there is a `token`, every request but those to `OPEN_PATHS`
    must send it as `Authorization: Bearer …`."""
    budget = bodies or BodyBudget(max_bytes=MAX_BODY_BYTES)

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check(request, guard, token)
        except ApiError as error:
            refused = _error(error)
            refused.force_close()
            return refused
        try:
            with budget.request(request):
                return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            return _error(not_served(request, app))
        except web.HTTPException:
            raise
        except Exception as error:
            return _error(as_api_error(error))

    app = web.Application(middlewares=[answer_errors], client_max_size=budget.max_bytes)
    app[BUDGET] = budget
    app.add_routes(routes)
    return app


def _check(request: web.Request, guard: Guard, token: str) -> None:
    if refusal := guard.refusal(request):
        raise ApiError(refusal.reason, status=refusal.status, code=refusal.code)
    if not token or request.path in OPEN_PATHS:
        return
    given = bearer_token(request)
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
        raise ApiError(
            "the token is missing or wrong: send `Authorization: Bearer TOKEN` (api_key of OpenAI's client)",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )


def _error(error: ApiError) -> web.Response:
    return answer(error.body(), status=error.status)


def not_served(request: web.Request, app: web.Application) -> ApiError:
    """Return the error for an unknown route or method, which lists the routes that there are."""
    known = sorted({route.resource.canonical for route in app.router.routes() if route.resource is not None})
    return ApiError(
        f"{request.method} {request.path} is not served here; there are: {', '.join(known)}",
        status=405 if request.path in known else 404,
        code="not_found",
    )
