"""Describes errors in the JSON shape that OpenAI's clients read."""

import logging
from typing import Any

from penstock.errors import PenstockError, RequestRefused

log = logging.getLogger(__name__)


class ApiError(Exception):
    """Becomes an error response with `status`, a sentence, and OpenAI's name for the kind of error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code},
        }


def unsupported(param: str, why: str) -> ApiError:
    """Return the error for a setting that would change the answer and is not supported."""
    return ApiError(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def as_api_error(error: Exception) -> ApiError:
    """Return the error as the client gets it. Unexpected errors are logged, and the client gets no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        return ApiError(str(error))
    if isinstance(error, PenstockError):
        return ApiError(str(error), status=500, kind="server_error")
    log.error("a request failed", exc_info=error)
    return ApiError("the server failed; its log says more", status=500, kind="server_error")
