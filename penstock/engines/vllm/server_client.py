"""Makes HTTP calls to one vLLM server, and turns its refusals into sentences."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any

import aiohttp

from penstock.engines.vllm.dialect import Event
from penstock.errors import EngineLost, PenstockError, RequestRefused

GENERATE = "/inference/v1/generate"
CALL_TIMEOUT_S = 600.0
"""For calls that wait for running answers or for weights."""
JSON = {"Content-Type": "application/json"}
"""Sent with a POST without a body too: `penstock serve` accepts no other."""
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)


class ServerClient:
    """Calls the server at `url`, which is `http://host:port`, or `unix:PATH` for a socket on this machine."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        is_socket = url.startswith("unix:")
        # A server closes idle connections, and a call on a connection that is being closed can't know whether it
        # arrived. So each call has a connection of its own.
        self._base = "http://vllm" if is_socket else url.rstrip("/")
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(url.removeprefix("unix:"), limit=0, force_close=True)
            if is_socket
            else aiohttp.TCPConnector(limit=0, force_close=True)
        )
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
        )

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def status(self, method: str, path: str, body: Any = None, *, timeout_s: float = 30.0) -> int:
        """Return the status of an answer, even of an error."""
        return (await self._exchange(method, path, body, timeout_s=timeout_s))[0]

    async def get(self, path: str, *, timeout_s: float = 30.0) -> Any:
        return await self._checked("GET", path, None, timeout_s=timeout_s)

    async def post(self, path: str, body: Any = None, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return await self._checked("POST", path, body, timeout_s=timeout_s)

    async def ask_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Call a method of every vLLM worker, and return one answer for each."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        results: list[dict[str, Any]] = answer["results"] if answer else []
        return results

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        parse: Callable[[bytes], Event | None],
        *,
        request_id: str,
    ) -> AsyncIterator[Event]:
        """Yield the parsed events of one generation. Closing the iterator early ends the generation on the
        server."""
        try:
            async with self._session.post(self._base + path, json=body) as response:
                if response.status >= 400:
                    text = await response.text()
                    words = f"request {request_id!r} was refused by {self.name}: {_message(text)}"
                    if response.status < 500:
                        raise RequestRefused(words)
                    raise EngineLost(words)
                async for line in response.content:
                    event = parse(line)
                    if event is not None:
                        yield event
        except _LOST as error:
            raise EngineLost(f"{self.name} lost its vLLM server at {self.url}: {error}") from error

    async def _checked(self, method: str, path: str, body: Any, *, timeout_s: float) -> Any:
        status, text = await self._exchange(method, path, body, timeout_s=timeout_s)
        if status >= 400:
            raise PenstockError(f"{self.name}: vLLM answered {method} {path} with {status}: {_message(text)}")
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:  # some answers are a plain sentence
            return text

    async def _exchange(self, method: str, path: str, body: Any, *, timeout_s: float) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self._base + path, json=body, headers=JSON, timeout=timeout
            ) as response:
                return response.status, await response.text()
        except _LOST as error:
            raise EngineLost(f"{self.name} can't reach its vLLM server at {self.url}: {error}") from error
        except TimeoutError as error:
            raise EngineLost(
                f"{self.name}: {path} of {self.url} did not answer in {timeout_s:g} s"
            ) from error


def _message(text: str) -> str:
    try:
        data = json.loads(text)
    except ValueError:
        return text.strip()[:300]
    error = data.get("error", data.get("detail", data)) if isinstance(data, dict) else data
    found = error.get("message", error) if isinstance(error, dict) else error
    return str(found)[:600]


SILENCE_S = 1.0
"""Silence of this length is always allowed. Beyond it `run.freeze_s` decides, since a silent server may be
computing a long prompt."""


class Call:
    """Yields the events of one `generate` call as they come, until it or the engine ends. It reads in a task of
    its own, so that a silent server can't keep a closed engine waiting."""

    def __init__(
        self,
        stream: AsyncIterator[Event],
        closed: asyncio.Event,
        lost: asyncio.Event | None = None,
        *,
        what: str,
    ) -> None:
        """`what` names the answer in error messages. Once `lost` is set, what the server sends is ignored."""
        self._stream = stream
        self._what = what
        self._closed = closed
        self._lost = lost or asyncio.Event()
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.was_closed = False
        """The call ended because the engine is closing."""

    async def __aenter__(self) -> "Call":
        watching = (self._read(), self._await_close(), self._await_loss())
        self._tasks = [asyncio.create_task(each) for each in watching]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events. The last one has a finish reason, unless the engine closes."""
        while True:
            event = await self._events.get()
            if self._closed.is_set() and not isinstance(event, Event):
                self.was_closed = True
                return
            if isinstance(event, Exception):
                raise event
            if event is not None:
                yield event
                if event.finish_reason is not None:
                    return

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                self._events.put_nowait(event)
            raise EngineLost(f"the server ended {self._what} too early")
        except Exception as error:
            self._events.put_nowait(error)

    async def _await_loss(self) -> None:
        await self._lost.wait()
        self._events.put_nowait(EngineLost(f"{self._what} ended with its server"))

    async def _await_close(self) -> None:
        await self._closed.wait()
        self._events.put_nowait(None)
