"""The page in a real browser: only with `--chromium`, as `make live-browser` gives it."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from benchmarks.chromium import chromium

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--chromium") is None:
        for item in items:
            if HERE in Path(item.path).parents:
                item.add_marker(pytest.mark.skip(reason="needs a browser: make live-browser"))


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of one Chromium for all tests: each has tabs of its own."""
    program = str(request.config.getoption("--chromium"))
    started: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def keep() -> None:
        ended = asyncio.Event()
        async with chromium(program) as found:
            started.set_result((found.port, asyncio.get_running_loop(), ended))
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(keep()))
    thread.start()
    port, loop, ended = started.result(timeout=60)
    yield port
    loop.call_soon_threadsafe(ended.set)
    thread.join(timeout=20)
