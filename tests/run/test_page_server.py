"""The page beside a run: no process before somebody opens it, a niced one then, and a line when it fails."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from penstock.observe.config import ObserveConfig
from penstock.observe.page_address import bind
from penstock.run.page_server import dashboard
from tests.observe.examples import phase, run_event, step
from tests.observe.store.written import write

pytestmark = pytest.mark.processes

PAGE = """
import json, os, socket, sys
settings = json.loads(sys.stdin.readline())
listening = socket.socket(fileno=int(sys.argv[1]))
listening.setblocking(True)
connection, _ = listening.accept()
connection.recv(1000)
body = json.dumps([settings, os.getpid()]).encode()
connection.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
connection.close()
sys.stdin.read()
"""
"""A page's process as the door sees it: its settings by its input, the socket by its number."""


def config(**settings: object) -> ObserveConfig:
    return ObserveConfig.model_validate({"dashboard_port": 0, **settings})


@contextlib.asynccontextmanager
async def opened(
    folder: Path, lines: list[str], script: str = PAGE, **settings: object
) -> AsyncIterator[str]:
    command = (sys.executable, "-c", script)
    async with dashboard(config(**settings), folder, lines.append, command=command):
        yield lines[0].removeprefix("dashboard: ")


async def ask(address: str) -> list[object]:
    async with aiohttp.ClientSession() as session, session.get(address.partition("#")[0]) as answer:
        found: list[object] = json.loads(await answer.text())
        return found


def test_the_first_connection_starts_the_page_and_is_answered(tmp_path: Path) -> None:
    async def main() -> tuple[list[object], str]:
        lines: list[str] = []
        async with asyncio.timeout(30), opened(tmp_path, lines, dashboard_hosts=("hub",)) as address:
            assert not (tmp_path / "logs").exists()  # nothing has been started yet
            found = await ask(address)
            assert lines == [f"dashboard: {address}"]
            return found, address

    (settings, _), address = asyncio.run(main())
    token = address.partition("#token=")[2]
    assert settings == {"folder": str(tmp_path), "token": token, "allow_hosts": ["hub"]}
    assert len(token) >= 32


def test_the_real_page_reads_the_run_folder_beside_the_run(tmp_path: Path) -> None:
    write(tmp_path, [run_event(1.0), phase("training", 2.0), step(1, 3.0)])

    async def main() -> tuple[int, int]:
        lines: list[str] = []
        async with asyncio.timeout(60), dashboard(config(), tmp_path, lines.append):
            base, _, token = lines[0].removeprefix("dashboard: ").partition("#token=")
            async with aiohttp.ClientSession() as session:
                refused = await session.get(f"{base}api/runs")
                answer = await session.get(f"{base}api/runs", headers={"X-Penstock-Token": token})
                (run,) = (await answer.json())["runs"]
                return refused.status, run["last"]

    assert asyncio.run(main()) == (401, 1)


def test_a_page_that_ends_is_started_again_with_the_next_connection(tmp_path: Path) -> None:
    once = PAGE.replace("sys.stdin.read()", "")

    async def main() -> tuple[list[object], list[str]]:
        lines: list[str] = []
        async with asyncio.timeout(30), opened(tmp_path, lines, once) as address:
            pids = [(await ask(address))[1] for _ in range(2)]
            return pids, lines

    pids, lines = asyncio.run(main())
    assert pids[0] != pids[1]
    assert lines[1].startswith("the dashboard ended (exit code 0, see ")


def test_a_page_that_can_not_start_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> list[str]:
        lines: list[str] = []
        said = asyncio.Event()

        def say(line: str) -> None:
            lines.append(line)
            if "without it" in line:
                said.set()

        async with (
            asyncio.timeout(30),
            dashboard(config(), tmp_path, say, command=(str(tmp_path / "nothing"),)),
        ):
            address = lines[0].removeprefix("dashboard: ").partition("#")[0]
            host, port = address.removeprefix("http://").rstrip("/").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            await said.wait()
            writer.close()
        return lines

    lines = asyncio.run(main())
    assert lines[1].startswith("the dashboard can't be started (") and lines[1].endswith(
        "the run continues without it"
    )


def test_a_taken_port_is_left_to_its_owner(tmp_path: Path) -> None:
    async def main() -> tuple[int, int]:
        with bind("127.0.0.1", 0) as taken:
            port = int(taken.getsockname()[1])
            lines: list[str] = []
            async with opened(tmp_path, lines, dashboard_port=port) as address:
                return port, int(address.partition("#")[0].rstrip("/").rpartition(":")[2])

    taken, used = asyncio.run(main())
    assert used not in (0, taken)


def test_an_address_that_is_not_ours_is_a_line(tmp_path: Path) -> None:
    async def main() -> list[str]:
        lines: list[str] = []
        async with opened(tmp_path, lines, dashboard_host="192.0.2.1"):
            return lines

    assert asyncio.run(main())[0].startswith("no dashboard: the page can't be served on 192.0.2.1")


def test_switched_off_it_says_nothing(tmp_path: Path) -> None:
    async def main() -> list[str]:
        lines: list[str] = []
        async with dashboard(config(dashboard=False), tmp_path, lines.append):
            return lines

    assert asyncio.run(main()) == []
