"""One stream for a whole page: a line of JSON whenever a run has moved. The page has no other connection open."""

import asyncio
from typing import Any

from aiohttp import web

from penstock.dashboard.chart_answers import last_step, new_rows
from penstock.dashboard.json_answer import encode
from penstock.dashboard.now_answers import show_now
from penstock.dashboard.open_runs import OpenRuns
from penstock.observe.reading.run_reading import RunReading

QUIET_S = 10.0
"""After so long an empty line says that the server is there."""
PACE_S = 0.25
"""Between two messages: a person reads no faster."""


async def stream(runs: OpenRuns, request: web.Request) -> web.StreamResponse:
    """Lines until the page leaves."""
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
    """Of the runs that have moved since the last time."""
    found = []
    for number, run in enumerate(runs.readings):
        revision, step = sent.get(number, (-1, -1))
        if run.revision != revision or step < 0:
            found.append(_message(number, run, step))
            sent[number] = (run.revision, last_step(run))
    return found


def _message(number: int, run: RunReading, step: int) -> dict[str, Any]:
    """`rows` is missing where the page must ask for curves itself."""
    rows = None if step < 0 else new_rows(run, step)
    return {"run": number, "now": show_now(run), **({} if rows is None else {"rows": rows})}
