"""Services that are slow, broken, overloaded or gone."""

import asyncio
import urllib.error
from email.message import Message
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from penstock.http_server.http_calls import (
    HttpCalls,
    HttpConfig,
    InFlight,
    ServiceFailed,
    is_transient,
    is_url,
)
from tests.services import service


def test_what_may_pass_is_tried_again_with_longer_and_longer_waits() -> None:
    async def main() -> None:
        statuses, waits = [503, 429, 200], []

        async def answer(path: str, body: Any) -> Any:
            return web.json_response({"got": body}, status=statuses.pop(0))

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        async with service(answer) as url:
            calls = HttpCalls(HttpConfig(retry_s=0.25), sleep)
            assert await calls.post(url, {"x": 1}) == {"got": {"x": 1}}
        assert waits == [0.25, 0.5]
        with pytest.raises(ServiceFailed, match=r"127.0.0.1:\d+ could not be reached: "):
            await calls.post(url, {})
        assert len(waits) == 2 + 3

    asyncio.run(main())


def test_what_will_not_pass_is_told_at_once() -> None:
    async def main() -> None:
        made: list[Any] = [
            web.json_response({"why": "no such task"}, status=404),
            web.Response(text="<html>"),
            web.Response(text=" " * (16 * 2**20 + 1)),
        ]

        async def answer(path: str, body: Any) -> Any:
            return made.pop(0)

        async with service(answer) as url:
            calls = HttpCalls(HttpConfig())
            for said in ('answered 404: {"why"', "is not JSON: <html>", "more than 16 MiB"):
                with pytest.raises(ServiceFailed, match=said):
                    await calls.post(url, {})

    asyncio.run(main())


def test_a_service_that_does_not_answer_costs_its_time_limit() -> None:
    async def main() -> None:
        never = asyncio.Event()

        async def answer(path: str, body: Any) -> Any:
            await never.wait()
            return None

        async with service(answer) as url:
            with pytest.raises(ServiceFailed, match=r"did not answer within 0.05 s"):
                await HttpCalls(HttpConfig(timeout_s=0.05, retries=0)).post(url, {})
            never.set()

    asyncio.run(main())


def test_no_more_requests_are_in_flight_than_may_be() -> None:
    async def main() -> int:
        running, most = 0, 0
        full = asyncio.Event()

        async def answer(path: str, body: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
            await full.wait()
            running -= 1
            return None

        async with service(answer) as url:
            calls = HttpCalls(HttpConfig(in_flight=3))
            await asyncio.gather(*(calls.post(url, number) for number in range(10)))
        return most

    assert asyncio.run(main()) == 3


def test_places_are_shared_by_event_loops_and_given_back_by_who_gives_up() -> None:
    async def main() -> None:
        places = InFlight(1)

        async def elsewhere() -> str:
            async with places.place():
                return "in"

        async with places.place():
            other_loop = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
            impatient = asyncio.create_task(elsewhere())
            await asyncio.sleep(0)
            impatient.cancel()
            await asyncio.wait({impatient})
            assert impatient.cancelled()
        assert await other_loop == "in"
        assert await elsewhere() == "in"

    asyncio.run(main())


def test_urls_are_known_by_how_they_begin() -> None:
    assert [is_url(path) for path in ("http://a", "https://a/b", "a:b", "python http://a")] == [
        True,
        True,
        False,
        False,
    ]


class APIConnectionError(Exception):
    """As OpenAI's client calls it."""


class HTTPStatusError(Exception):
    """As httpx calls it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status)


class APIStatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status


def answered(status: int) -> aiohttp.ClientResponseError:
    url = URL("http://judge/")
    info = aiohttp.RequestInfo(url, "POST", headers=None, real_url=url)  # type: ignore[arg-type]
    return aiohttp.ClientResponseError(info, (), status=status)


def opened(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://judge/", status, "no", Message(), None)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("no"),
        BrokenPipeError("gone"),
        TimeoutError("late"),
        APIConnectionError("no"),
        urllib.error.URLError("no route"),
        aiohttp.ServerDisconnectedError(),
        answered(503),
        opened(429),
        HTTPStatusError(500),
        APIStatusError(502),
        ExceptionGroup("both", [ConnectionResetError("gone"), TimeoutError("late")]),
    ],
)
def test_what_could_not_be_reached_may_pass(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        FileNotFoundError("rules.json"),
        SystemExit(3),
        answered(404),
        opened(401),
        HTTPStatusError(400),
        APIStatusError(422),
        APIStatusError(501),
        ExceptionGroup("both", [ConnectionResetError("gone"), KeyError("answer")]),
    ],
)
def test_what_is_wrong_stays_wrong(error: BaseException) -> None:
    assert not is_transient(error)
