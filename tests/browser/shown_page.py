"""A page of made-up runs, open in a browser."""

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from benchmarks.chromium import Chromium, Page
from penstock.observe.page_address import bind, page_address
from penstock.page.serving_page import served_page
from tests.page.fake_run import FakeRun

TOKEN = "a-token-of-some-length"
READY = "document.querySelector('#view .view[data-ready]')"


@contextlib.asynccontextmanager
async def shown(
    browser: int, runs: Sequence[Any] = (), *, width: int = 1280, height: int = 900, dark: bool = False
) -> AsyncIterator[Page]:
    """The view Now is in sight, and everything that the page complained of is in `page.console`."""
    async with served_tab(browser, runs or [FakeRun()], width=width, height=height, dark=dark) as (
        page,
        listening,
    ):
        await page.open(page_address(listening, TOKEN))
        await page.until(READY)
        yield page


@contextlib.asynccontextmanager
async def served_tab(
    browser: int, runs: Sequence[Any], **options: Any
) -> AsyncIterator[tuple[Page, socket.socket]]:
    """Runs that are served, and an empty tab."""
    with bind("127.0.0.1", 0) as listening:
        async with (
            served_page(runs, listening, token=TOKEN),
            aiohttp.ClientSession() as session,
            Chromium(browser, session).new_page(**options) as page,
        ):
            yield page, listening


async def go(page: Page, place: str) -> None:
    """To another view, until it is there."""
    await page.run("document.querySelector('#view .view').removeAttribute('data-ready')")
    await page.run(
        f"location.hash === '#/{place}' ? dispatchEvent(new Event('hashchange')) : location.hash = '#/{place}'"
    )
    await page.until(READY)


async def says(page: Page, text: str, selector: str = "#view") -> None:
    """Wait until a text is there: charts and tables come a moment after their view."""
    await page.until(f"document.querySelector({selector!r}).innerText.includes({json.dumps(text)})")


async def words(page: Page, selector: str = "#view") -> str:
    return str(await page.run(f"document.querySelector({selector!r}).innerText"))
