"""JSON to a service and JSON back, with few requests at once, a time limit, and another try where that may help.

Rewards and environments by URL use `HttpCalls`, from event loops of several threads at once: the limit is one for
all of them. Rewards and workflows of a user ask `is_transient` before they try again; errors are known by the
names of their classes and by the HTTP status that they carry, so no library is imported for it.
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
"""Characters of an answer that an error shows."""
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
"""Names of transient errors, as Python, urllib, aiohttp, httpx, requests and OpenAI's client call them."""
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status that may be another one a moment later."""
FIRST_S, LONGEST_S = 1.0, 30.0


class HttpConfig(Section):
    """How services are asked that are named by URL."""

    in_flight: int = Field(default=32, ge=1)
    """Requests at once, of one worker process."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of one request."""
    retries: int = Field(default=3, ge=0)
    """Further tries after a connection that broke, a time limit, or an answer of 408, 425, 429, 500, 502, 503 or
    504."""
    retry_s: float = Field(default=0.5, gt=0)
    """Wait before the second try; each further one waits twice as long."""


class ServiceFailed(PenstockError):
    """A service did not answer, or not as it should."""


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


class InFlight:
    """So many places, for coroutines of any event loop."""

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
            self._give_on()  # it was given a place at the same moment

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
    """`post(url, body)` under the limits of a config. `sleep` waits between two tries."""

    def __init__(self, config: HttpConfig, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._config = config
        self._sleep = sleep
        self._places = InFlight(config.in_flight)

    async def post(self, url: str, body: Any) -> Any:
        """What the service answers, as JSON has it. Raises `ServiceFailed`."""
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
        """The answer, or what is wrong with it and whether another try may help."""
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
    """How long to wait before the try after this one, counted from 0: twice as long each time."""
    return min(LONGEST_S, FIRST_S * 2.0**attempt)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later. Of several errors at once, all must."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_transient(one) for one in error.exceptions)
    status = status_of(error)
    if status is not None:
        return status in TRY_AGAIN
    return any(kind.__name__ in TRANSIENT for kind in type(error).__mro__)


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
