"""What is said of a route that is not there."""

from aiohttp import web

from penstock.serve.api_error import ApiError


def not_served(request: web.Request, app: web.Application) -> ApiError:
    """For a route that is not there, or not with this method: what is."""
    known = sorted({route.resource.canonical for route in app.router.routes() if route.resource is not None})
    return ApiError(
        f"{request.method} {request.path} is not served here; there are: {', '.join(known)}",
        status=405 if request.path in known else 404,
        code="not_found",
    )
