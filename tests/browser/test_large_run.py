"""A run of 50,000 steps and 100,000 samples in Chromium: charts come soon, updates are quick, samples are found."""

import asyncio
import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.chromium import Page
from benchmarks.made_run import write_made_run
from benchmarks.page_chart import open_charts
from penstock.observe.events import AnyEvent, PhaseEvent, RunEvent, StepEvent
from penstock.observe.page_address import page_address
from penstock.observe.reading.run_reading import LOCK, RunReading
from penstock.observe.run_state import RunState
from penstock.observe.store.event_store import EventStore, budgets
from tests.browser.shown_page import TOKEN, go, served_tab, words

STEPS, SAMPLES = 50_000, 2
FIRST_CHART_S, UPDATE_S = 2.0, 0.050
UPDATES = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    return write_made_run(path, steps=STEPS, samples_per_step=SAMPLES, tokens_per_answer=20, spans_per_step=2)


@pytest.mark.timeout(400)
def test_a_long_run_opens_soon_and_is_followed_quickly(browser: int, folder: Path) -> None:
    async def main() -> tuple[float, list[float]]:
        reading = RunReading(folder)
        reading.refresh()  # as `penstock view` does before it prints the address
        reading.status()
        async with served_tab(browser, [reading]) as (page, listening):
            first = await first_chart(page, page_address(listening, TOKEN))
            await check_samples(page)
            await go(page, "metrics")
            await page.until("document.querySelectorAll('.chart canvas').length >= 6")
            with held(folder):
                await follow(page, reading)
            assert page.console == []
            measured = await page.run(
                "performance.getEntriesByName('penstock-update').map((one) => one.duration)"
            )
            return first, [one / 1000 for one in measured]

    first_s, updates = asyncio.run(main())
    print(json.dumps({"first_chart_s": first_s, "update_s": median(updates), "updates": len(updates)}))
    assert first_s <= FIRST_CHART_S
    assert len(updates) >= UPDATES // 2 and median(updates) <= UPDATE_S


async def first_chart(page: Page, address: str) -> float:
    """Seconds from the navigation to charts on the screen, by the page's own clock."""
    await open_charts(page, address)
    return float(await page.run("performance.getEntriesByName('penstock-charts-drawn')[0].startTime")) / 1000


async def check_samples(page: Page) -> None:
    await go(page, "samples")
    assert f"{STEPS * SAMPLES + STEPS // 10:,} kept samples" in await words(page)
    await go(page, "samples?step=49000&reward=1..1")
    assert "reward 1" in await words(page)


async def follow(page: Page, reading: RunReading) -> None:
    """The run is resumed: more steps are written, and arrive."""
    state = RunState()
    store = EventStore(reading.folder, state, budgets(samples_mb=100, tokens_mb=100, spans_mb=100))
    for event in resumed(reading):
        state.on(event)
        store.on(event)
        if isinstance(event, StepEvent):
            await page.until(f"document.querySelector('.facts').innerText.includes('{event.step:,} /')", 60)
    store.close()


def resumed(reading: RunReading) -> Iterator[AnyEvent]:
    at = reading.now + 10
    metrics = {name: 0.5 for name in reading.steps.names if name.startswith("metric_")}
    yield RunEvent(
        process="controller",
        time=at,
        name="large",
        folder=str(reading.folder),
        steps=STEPS + UPDATES,
        step=STEPS,
        wall_s=(reading.started_s or 0) + at,
    )
    yield PhaseEvent(process="controller", time=at, phase="training")
    for number in range(1, UPDATES + 1):
        yield StepEvent(
            process="controller",
            time=at + number,
            step=STEPS + number,
            reward=0.5,
            num_samples=SAMPLES,
            metrics=metrics,
            seconds={"forward": 0.5},
            waited_s=0.1,
            took_s=0.9,
            max_staleness=4,
        )


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """As a controller holds the folder of its run."""
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_the_fetch_stream_is_the_only_connection_that_stays_open(browser: int, folder: Path) -> None:
    async def main() -> int:
        reading: Any = RunReading(folder)
        async with served_tab(browser, [reading]) as (page, listening):
            await page.open(page_address(listening, TOKEN))
            await page.until("document.querySelector('.view[data-ready]')", 60)
            for view in ("now", "metrics", "samples"):
                await go(page, view)
            live = [request for request in page.requests if request.endswith("/api/live")]
            return len(live)

    assert asyncio.run(main()) == 1
