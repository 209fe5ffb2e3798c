"""Errors that pass: what could not be reached now may be there a moment later. Everything else stays wrong however
often it is tried.

Rewards and workflows ask here before they try again. Libraries are not imported for it: errors are known by the
names of their classes, and by the HTTP status that they carry.
"""

PASSING = {
    "ConnectionError",
    "TimeoutError",
    "Timeout",
    "URLError",
    "ClientConnectionError",
    "ServerTimeoutError",
    "TransportError",
    "APIConnectionError",
    "RateLimitError",
    "ServiceUnavailableError",
}
"""Names of errors that pass, as Python, urllib, aiohttp, httpx, requests and OpenAI's client call them."""
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status that may be another one a moment later."""


FIRST_S, LONGEST_S = 1.0, 30.0


def wait_s(attempt: int) -> float:
    """Before the try after this one, counted from 0: twice as long each time."""
    return min(LONGEST_S, FIRST_S * 2.0**attempt)


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later. Of several errors at once, all must."""
    if isinstance(error, BaseExceptionGroup):
        return all(may_pass(one) for one in error.exceptions)
    status = status_of(error)
    if status is not None:
        return status in TRY_AGAIN
    return any(kind.__name__ in PASSING for kind in type(error).__mro__)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error tells of: aiohttp's `status`, OpenAI's `status_code`, urllib's `code`, or that
    of the `response` of httpx and requests."""
    response = getattr(error, "response", None)
    for owner, name in (
        (error, "status"),
        (error, "status_code"),
        (response, "status_code"),
        (error, "code"),
    ):
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
            return value
    return None
