"""What may be tried again, known by names and by HTTP status."""

import urllib.error
from email.message import Message
from types import SimpleNamespace

import aiohttp
import pytest
from yarl import URL

from penstock.passing_errors import may_pass


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
    assert may_pass(error)


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
    assert not may_pass(error)
