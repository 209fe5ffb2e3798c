"""Calls HTTP services with JSON, with limits for concurrent requests and time, and retries after transient errors.

Rewards and environments by URL use `HttpCalls`, from event loops of several threads at once, which share one limit.
The retries of rewards and workflows use `is_transient`, which knows errors by the names of their classes and by
their HTTP status, and so imports no library.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from pydantic import Field

from penstock.config import Section
from penstock.errors import PenstockError

MAX_ANSWER_BYTES = 16 * 2**20
SHOWN = 200
"""Characters of an answer that an error message shows."""
TRANSIENT = {
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
"""Class names of transient errors in Python, urllib, aiohttp, httpx, requests and OpenAI's client."""
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status codes after which a retry may help."""
FIRST_S, LONGEST_S = 1.0, 30.0


class HttpConfig(Section):
    """Sets how services that are named by URL are called."""

    in_flight: int = Field(default=32, ge=1)
    """Requests that one worker process makes to a service at once."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of one request."""
    retries: int = Field(default=3, ge=0)
    """Retries after a broken connection, a timeout, or an answer of 408, 425, 429, 500, 502, 503 or 504."""
    retry_s: float = Field(default=0.5, gt=0)
    """Wait before the first retry; each further retry waits twice as long."""


class ServiceFailed(PenstockError):
    """Raised when a service does not answer, or not as it should."""


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


class InFlight:
    """Limits concurrent requests, for coroutines of any event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set_result(None)
            else:
                self._waiting.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(loop, turn)
            raise
        try:
            yield
        finally:
            self._give_on()

    def _leave(self, loop: asyncio.AbstractEventLoop, turn: "asyncio.Future[None]") -> None:
        with self._lock:
            waited = (loop, turn) in self._waiting
            if waited:
                self._waiting.remove((loop, turn))
        if not waited:
            self._give_on()  # it got a slot at the same moment

    def _give_on(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                loop, turn = self._waiting.popleft()
            with suppress(RuntimeError):  # its loop has ended meanwhile
                loop.call_soon_threadsafe(_settle, turn)
                return


def _settle(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)


class HttpCalls:
    """Posts requests under the limits of a config. `sleep` waits between two tries."""

    def __init__(self, config: HttpConfig, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._config = config
        self._sleep = sleep
        self._places = InFlight(config.in_flight)

    async def post(self, url: str, body: Any) -> Any:
        """Return the service's answer as decoded JSON, or raise `ServiceFailed`."""
        wait_s = self._config.retry_s
        for tries_left in reversed(range(self._config.retries + 1)):
            async with self._places.place():
                answer, problem, may_retry = await self._once(url, body)
            if problem is None:
                return answer
            if not (may_retry and tries_left):
                raise ServiceFailed(f"{url} {problem}")
            await self._sleep(wait_s)
            wait_s *= 2
        raise AssertionError("the last try returns or raises")

    async def _once(self, url: str, body: Any) -> tuple[Any, str | None, bool]:
        """Return the answer, or what is wrong with it and whether a retry may help."""
        import aiohttp

        limit_s = self._config.timeout_s
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s)) as session,
                session.post(url, json=body) as response,
            ):
                data = bytearray()
                async for piece in response.content.iter_any():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        return None, f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB", False
                text = data.decode(errors="replace")
                if response.status != 200:
                    said = f"answered {response.status}: {text[:SHOWN]}"
                    return None, said, response.status in TRY_AGAIN
        except TimeoutError:
            return None, f"did not answer within {limit_s:g} s", True
        except aiohttp.ClientError as error:
            return None, f"could not be reached: {error}", True
        try:
            return json.loads(text), None, False
        except ValueError:
            return None, f"answered with something that is not JSON: {text[:SHOWN]}", False


def retry_wait_s(attempt: int) -> float:
    """Return the seconds to wait after try number `attempt`, counted from 0: 1, 2, 4 … up to 30."""
    return min(LONGEST_S, FIRST_S * 2.0**attempt)


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed a moment later. For a group of errors, all must be transient."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_transient(one) for one in error.exceptions)
    status = status_of(error)
    if status is not None:
        return status in TRY_AGAIN
    return any(kind.__name__ in TRANSIENT for kind in type(error).__mro__)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries: aiohttp's `status`, OpenAI's `status_code`, urllib's `code`,
    or that of the `response` of httpx and requests."""
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
