"""Which names, origins and contents a server answers to; doors as they are open in `test_every_door.py`."""

import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from penstock.http_server.guard import Guard, bearer_token, guard_for, host_name


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("127.0.0.1:8421", "127.0.0.1"),
        ("LocalHost:9000", "localhost"),
        ("localhost.", "localhost"),
        ("[::1]:8421", "[::1]"),
        ("[0:0:0:0:0:0:0:1]", "[::1]"),
        ("hub.example", "hub.example"),
        ("localhost:80:80", None),
        ("localhost@evil", None),
        ("localhost evil", None),
        ("[::1", None),
        ("[:::]", None),
        ("", None),
    ],
)
def test_a_host_is_read_without_its_port(header: str, name: str | None) -> None:
    assert host_name(header) == name


def told(guard: Guard, method: str = "GET", **headers: str) -> tuple[int, str] | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    refusal = guard.refusal(make_mocked_request(method, "/", headers=named))
    return None if refusal is None else (refusal.status, refusal.reason)


def test_known_names_are_loopback_the_own_address_and_those_allowed() -> None:
    assert guard_for("127.0.0.1", advice="").hosts == {"127.0.0.1", "localhost", "[::1]"}
    assert "10.0.0.7" in guard_for("10.0.0.7", advice="").hosts
    assert "hub.example" in guard_for("127.0.0.1", allowed=("Hub.Example",), advice="").hosts


@pytest.mark.parametrize("listening", ["0.0.0.0", "::"])
def test_who_listens_everywhere_is_known_by_every_address_and_the_names_of_the_machine(
    listening: str,
) -> None:
    guard = guard_for(listening, advice="use another name")
    for host in ("10.0.0.7:8000", "[fe80::1]:8000", socket.gethostname(), "host.docker.internal:8000"):
        assert told(guard, Host=host) is None
    assert told(guard, Host="evil.example") == (
        403,
        "the Host 'evil.example' is not known here: use another name",
    )
    assert told(guard, Host="10.0.0.7.evil.example") is not None
    assert told(guard_for("127.0.0.1", advice=""), Host="10.0.0.7") is not None


@pytest.mark.parametrize(
    ("origin", "known"),
    [
        ("http://localhost:9000", True),
        ("https://hub.example", True),
        ("http://localhost:8888", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
        ("file://localhost:9000", False),
    ],
)
def test_pages_may_ask_that_came_from_here_or_from_a_name_that_is_allowed(origin: str, known: bool) -> None:
    guard = guard_for("127.0.0.1", allowed=("hub.example",), advice="")
    assert (told(guard, Host="localhost:9000", Origin=origin) is None) is known


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("application/json", True),
        ("application/json; charset=utf-8", True),
        ("Application/JSON", True),
        ("text/plain", False),
        ("text/plain; application/json", False),
        ("application/x-www-form-urlencoded", False),
        (None, False),
    ],
)
def test_a_post_says_that_it_is_json(kind: str | None, known: bool) -> None:
    headers = {"Host": "localhost"} | ({} if kind is None else {"Content_Type": kind})
    refused = told(guard_for("127.0.0.1", advice=""), "POST", **headers)
    assert (refused is None) is known
    if kind is None:
        assert refused == (
            415,
            "a POST must say that it is JSON, also without a body: send the header `Content-Type: "
            "application/json`, got 'none'",
        )


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer t", "t"), ("bearer  t ", "t"), ("t", ""), ("Basic t", ""), ("Bearer", ""), ("", "")],
)
def test_a_token_follows_the_word_bearer(header: str, token: str) -> None:
    request: web.Request = make_mocked_request("GET", "/", headers={"Authorization": header})
    assert bearer_token(request) == token
