"""Routes the HTTP requests of the page: its own files, and the data that it asks for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from penstock.observe.prometheus_metrics import CONTENT_TYPE, prometheus_text
from penstock.observe.reading.run_reading import RunReading
from penstock.page.age_answers import show_ages
from penstock.page.chart_answers import last_step, list_metrics, new_rows, show_curves
from penstock.page.compare_answers import compare_answers, compare_runs, shared_tasks
from penstock.page.drop_answers import show_drops
from penstock.page.json_answer import answer, encode
from penstock.page.now_answers import show_config, show_lines, show_machine, show_now, show_time
from penstock.page.open_runs import OpenRuns
from penstock.page.page_access import PageAccess, add_headers, guard
from penstock.page.page_files import send_page_file
from penstock.page.query_values import Refused
from penstock.page.sample_answers import count_samples, list_samples, show_group, show_sample
from penstock.page.timeline_answers import show_timeline
from penstock.page.token_answers import nearest_traced, show_tokens

Query = Mapping[str, str]
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]
ONE_RUN: dict[str, Callable[[RunReading, Query], Any]] = {
    "samples": list_samples,
    "counts": count_samples,
    "traced": lambda run, query: nearest_traced(run),
    "now": lambda run, query: show_now(run),
    "lines": lambda run, query: show_lines(run),
    "time": lambda run, query: show_time(run),
    "ages": show_ages,
    "drops": show_drops,
    "timeline": show_timeline,
    "curves": show_curves,
    "metrics": lambda run, query: list_metrics(run),
    "machine": lambda run, query: show_machine(run),
    "config": lambda run, query: show_config(run),
}
"""Functions that answer `/api/run/N/NAME`, by name."""
ONE_THING: dict[str, Callable[[RunReading, int], Any]] = {
    "sample": show_sample,
    "tokens": show_tokens,
    "group": show_group,
}
"""Functions that answer `/api/run/N/NAME/NUMBER`, by name."""
ALL_RUNS: dict[str, Callable[..., Any]] = {
    "compare": compare_runs,
    "tasks": shared_tasks,
    "answers": compare_answers,
}
"""Functions that answer `/api/NAME`, by name."""
RUNS: web.AppKey[OpenRuns] = web.AppKey("runs", OpenRuns)


def make_app(runs: OpenRuns, access: PageAccess) -> web.Application:
    app = web.Application(middlewares=[guard(access)])
    app[RUNS] = runs
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_followed)
    app.router.add_get("/api/runs", _list_runs)
    app.router.add_get("/api/live", _live)
    app.router.add_get("/metrics", _prometheus)
    for name, show_all in ALL_RUNS.items():
        app.router.add_get(f"/api/{name}", _of_all(show_all))
    for name, show in ONE_RUN.items():
        app.router.add_get(f"/api/run/{{run:[0-9]+}}/{name}", _of_run(show))
    for name, show_one in ONE_THING.items():
        app.router.add_get(f"/api/run/{{run:[0-9]+}}/{name}/{{number:[0-9]+}}", _of_thing(show_one))
    app.router.add_get("/{path:.*}", send_page_file)
    return app


async def _followed(app: web.Application) -> AsyncIterator[None]:
    async with app[RUNS].followed():
        yield


def _reading(request: web.Request) -> RunReading:
    readings, number = request.app[RUNS].readings, int(request.match_info["run"][:6])
    if number >= len(readings):
        raise Refused(f"there is no run {number}: {len(readings)} are shown", 404)
    return readings[number]


def _of_run(show: Callable[[RunReading, Query], Any]) -> Route:
    async def handle(request: web.Request) -> web.StreamResponse:
        run = _reading(request)
        return answer(await request.app[RUNS].ask(lambda: show(run, request.query)))

    return handle


def _of_thing(show: Callable[[RunReading, int], Any]) -> Route:
    async def handle(request: web.Request) -> web.StreamResponse:
        run, number = _reading(request), int(request.match_info["number"][:18])
        return answer(await request.app[RUNS].ask(lambda: show(run, number)))

    return handle


def _of_all(show: Callable[..., Any]) -> Route:
    async def handle(request: web.Request) -> web.StreamResponse:
        runs = request.app[RUNS]
        return answer(await runs.ask(lambda: show(runs.readings, request.query)))

    return handle


async def _list_runs(request: web.Request) -> web.StreamResponse:
    runs = request.app[RUNS]
    return answer(await runs.ask(lambda: {"runs": [show_now(run) for run in runs.readings]}))


async def _live(request: web.Request) -> web.StreamResponse:
    return await stream(request.app[RUNS], request)


async def _prometheus(request: web.Request) -> web.StreamResponse:
    """Answer a Prometheus scraper, which must send the token as `Authorization: Bearer …`, for the first run."""
    runs = request.app[RUNS]
    text = await runs.ask(lambda: prometheus_text(runs.readings[0].state))
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


QUIET_S = 10.0
"""Seconds without a message after which an empty line tells the page that the server is alive."""
PACE_S = 0.25
"""Seconds between two messages: a person reads no faster."""


async def stream(runs: OpenRuns, request: web.Request) -> web.StreamResponse:
    """Stream messages as lines until the page disconnects."""
    with runs.watching():
        return await _send(runs, request)


async def _send(runs: OpenRuns, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "X-Accel-Buffering": "no"})
    await response.prepare(request)
    sent: dict[int, tuple[int, int]] = {}
    seen = -1
    while True:
        changes = await runs.wait_past(seen, QUIET_S)
        moved = changes != seen
        seen = changes
        messages = await runs.ask(lambda: _messages(runs, sent)) if moved else []
        for message in messages:
            await response.write(encode(message) + b"\n")
        if not messages:
            await response.write(b"\n")
        await asyncio.sleep(PACE_S)


def _messages(runs: OpenRuns, sent: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return a message for each run with news since the last call."""
    found = []
    for number, run in enumerate(runs.readings):
        revision, step = sent.get(number, (-1, -1))
        if run.revision != revision or step < 0:
            found.append(_message(number, run, step))
            sent[number] = (run.revision, last_step(run))
    return found


def _message(number: int, run: RunReading, step: int) -> dict[str, Any]:
    """Make a message of the run's present state. `rows` is missing where the page must request curves itself."""
    rows = None if step < 0 else new_rows(run, step)
    return {"run": number, "now": show_now(run), **({} if rows is None else {"rows": rows})}
