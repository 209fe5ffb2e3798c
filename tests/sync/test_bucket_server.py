import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch

from penstock.channel.address import GREETING_S, MAX_GREETINGS
from penstock.sync import bucket_server
from penstock.sync.bucket_server import HEAD_S, MAX_STRANGERS, BucketServer

DATA = torch.arange(200, dtype=torch.uint8)


@pytest.fixture
def server() -> Iterator[BucketServer]:
    server = BucketServer("127.0.0.1", "secret")
    yield server
    server.close()


def get(url: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request("GET", urlsplit(url).path, headers=headers)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def test_bytes_are_served_from_any_place_on(server: BucketServer) -> None:
    url = server.put(DATA)
    assert get(url, Authorization="Bearer secret") == (200, bytes(range(200)))
    assert get(url, Authorization="Bearer secret", Range="bytes=150-") == (206, bytes(range(150, 200)))
    assert get(url, Authorization="Bearer secret", Range="bytes=201-") == (416, b"")
    empty = server.put(torch.empty(0, dtype=torch.uint8))
    assert get(empty, Authorization="Bearer secret") == (200, b"")


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer secreT"}, {"Authorization": "secret"}])
def test_without_the_token_nothing_is_told(server: BucketServer, header: dict[str, str]) -> None:
    url = server.put(DATA)
    assert get(url, **header) == (401, b"")
    assert get(url + "0", **header) == (401, b"")


def test_a_head_without_the_token_is_the_last_of_its_connection(server: BucketServer) -> None:
    """A thread for it would wait for the next one."""
    host, _, port = urlsplit(server.put(DATA)).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nAuthorization: Bearer secreT\r\n\r\n")
        with stranger.makefile("rb") as answer:
            assert answer.read().startswith(b"HTTP/1.1 401 ")


def test_what_was_removed_is_gone(server: BucketServer) -> None:
    url = server.put(DATA)
    server.remove(url)
    assert get(url, Authorization="Bearer secret") == (404, b"")


def test_a_server_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="only with a token"):
        BucketServer("127.0.0.1", "")


def test_it_listens_on_the_loopback_alone(server: BucketServer) -> None:
    assert server._listening.getsockname()[0] == "127.0.0.1"


HOSTILE = [
    b"",
    b"\x00" * 100,
    b"GET",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\nhalf",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n",
    b"GET / HTTP/1.1\r\nAuthorization: Bearer secret\r\nRange: bytes=9999999999999999999999-\r\n\r\n",
    b"GET / HTTP/1.1\r\nAuthorization: \xff\xfe\r\n\r\n",
]


@pytest.mark.parametrize("data", HOSTILE)
def test_what_is_no_request_costs_its_own_connection_alone(server: BucketServer, data: bytes) -> None:
    """Whole, cut short, too long; and sent again on a connection that is still open."""
    url = server.put(DATA)
    host, _, port = urlsplit(url).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        with contextlib.suppress(OSError):  # the server may have closed it already
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            answer = stranger.recv(1 << 16)
            assert bytes(DATA.numpy()) not in answer
            assert b" 200 " not in answer
    assert get(url, Authorization="Bearer secret") == (200, bytes(range(200)))


def test_strangers_may_do_as_little_here_as_with_a_controller() -> None:
    assert (HEAD_S, MAX_STRANGERS) == (GREETING_S, MAX_GREETINGS)


def numbers_of_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def test_strangers_cost_no_thread_and_few_sockets(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they say nothing, half a head, or a head without the token. None is ended by its time here."""
    monkeypatch.setattr(bucket_server, "HEAD_S", 3600.0)
    url = server.put(DATA)
    assert get(url, Authorization="Bearer secret")[0] == 200
    before = numbers_of_threads()
    host, _, port = urlsplit(url).netloc.partition(":")
    said = (b"", b"GET / HT", b"GET / HTTP/1.1\r\nAuthorization: Bearer sec")
    with contextlib.ExitStack() as stack:
        strangers = []
        for number in range(3 * MAX_STRANGERS):
            strangers.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=10)))
            strangers[-1].sendall(said[number % 3])
        for one in strangers[: 2 * MAX_STRANGERS]:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""  # the oldest have given way
        assert get(url)[0] == 401
        assert get(url, Authorization="Bearer secret") == (200, bytes(range(200)))
        assert len(server._strangers._waiting) <= MAX_STRANGERS
        assert len(numbers_of_threads() - before) <= 1


def test_a_head_that_does_not_come_ends_the_connection(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_server, "HEAD_S", 0.01)
    host, _, port = urlsplit(server.put(DATA)).netloc.partition(":")
    for said in (b"", b"GET / HTTP/1.1\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(said)
            assert stranger.recv(1) == b""


def test_a_connection_serves_one_fetch_after_the_other_and_each_needs_the_token(server: BucketServer) -> None:
    url = urlsplit(server.put(DATA))
    connection = http.client.HTTPConnection(url.netloc, timeout=10)
    for headers, status in (({"Authorization": "Bearer secret"}, 200), ({}, 401)) * 2:
        connection.request("GET", url.path, headers=headers)
        response = connection.getresponse()
        assert (response.status, len(response.read())) == (status, 200 if status == 200 else 0)
    connection.close()


def test_a_number_of_thousands_of_digits_is_past_the_end(server: BucketServer) -> None:
    url = server.put(DATA)
    assert get(url, Authorization="Bearer secret", Range=f"bytes={'9' * 6000}-") == (416, b"")
    assert get(url, Range=f"bytes={'9' * 6000}-") == (401, b"")
