"""How long it takes from opening a run's page to its first chart, in a real browser."""

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.chromium import Page, chromium, find_chromium
from penstock.observe.page_address import bind, new_token, page_address
from penstock.observe.reading.run_reading import RunReading
from penstock.page.serving_page import served_page

DRAWN = (
    "performance.getEntriesByName('penstock-charts-drawn').length && document.querySelector('.chart canvas')"
)
FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def first_chart_s(folder: Path) -> float | None:
    """Seconds from the first look at a run's files to its drawn charts: reading all of its events, and loading the
    page. None where there is no Chromium."""
    if find_chromium() is None:
        return None
    return asyncio.run(_measure(folder))


async def _measure(folder: Path) -> float:
    async with chromium() as browser, browser.new_page() as page:
        token = new_token()
        with bind("127.0.0.1", 0) as listening:
            begin = time.perf_counter()
            async with served_page([RunReading(folder)], listening, token=token):
                await open_charts(page, page_address(listening, token))
                return time.perf_counter() - begin


async def open_charts(page: Page, address: str) -> Any:
    """The page's metrics, until the charts in sight are drawn."""
    base, _, token = address.partition("#token=")
    script = f"sessionStorage.setItem('penstock-token', {token!r})"
    await page.send("Page.addScriptToEvaluateOnNewDocument", source=script)
    await page.open(f"{base}#/metrics")
    await page.until(DRAWN, timeout_s=60)
    return await page.run(FRAMES)
