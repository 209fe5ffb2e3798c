"""Who is let in: methods, hosts and tokens, asked over a real socket."""

import asyncio

import pytest

from penstock.page.page_access import needs_token
from tests.page.live_page import TOKEN, served

GIVEN = {"X-Penstock-Token": TOKEN}


def test_only_what_is_of_a_run_needs_the_token() -> None:
    paths = ("/api/runs", "/api", "/metrics", "/", "/main.js", "/apiary")
    assert [needs_token(path) for path in paths] == [True, True, True, False, False, False]


def test_hosts_that_are_not_known_are_refused() -> None:
    async def main() -> list[int]:
        async with served(allow_hosts=("hub.example",)) as server:
            hosts = (
                "127.0.0.1",
                "localhost:1",
                "[::1]:8421",
                "hub.example",
                "evil.example",
                "127.0.0.1.evil.example",
                "localhost.evil.example",
                "evil.example:8421",
                "hub.example.evil",
            )
            return [(await server.ask("/api/runs", {**GIVEN, "Host": host}))[0] for host in hosts]

    assert asyncio.run(main()) == [200, 200, 200, 200, 403, 403, 403, 403, 403]


def test_a_foreign_host_does_not_even_get_the_page() -> None:
    async def main() -> int:
        async with served() as server:
            return (await server.ask("/", {"Host": "evil.example"}))[0]

    assert asyncio.run(main()) == 403


def test_what_is_of_a_run_needs_the_token_in_a_header() -> None:
    async def main() -> list[int]:
        async with served() as server:
            tried: list[dict[str, str]] = [
                {},
                {"X-Penstock-Token": "wrong"},
                {"X-Penstock-Token": TOKEN[:-1]},
                {"Authorization": "Bearer wrong"},
                {"Cookie": f"token={TOKEN}"},
                {"Authorization": f"Bearer {TOKEN}"},
                GIVEN,
            ]
            found = [(await server.ask("/api/runs", headers))[0] for headers in tried]
            return [*found, (await server.ask(f"/api/runs?token={TOKEN}"))[0]]

    assert asyncio.run(main()) == [401, 401, 401, 401, 401, 200, 200, 401]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_only_reading_methods_are_answered(method: str) -> None:
    async def main() -> int:
        async with served() as server:
            return (await server.ask("/api/runs", GIVEN, method))[0]

    assert asyncio.run(main()) == 405


@pytest.mark.parametrize(
    "path", ["/", "/main.js", "/api/runs", "/api/nothing", "/../../etc/passwd", "/%2e%2e/x"]
)
def test_every_answer_carries_the_security_headers(path: str) -> None:
    async def main() -> dict[str, str]:
        async with served() as server:
            url = f"http://127.0.0.1:{server.port}{path}"
            async with server.session.get(url, headers=GIVEN) as answer:
                return dict(answer.headers)

    headers = asyncio.run(main())
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
