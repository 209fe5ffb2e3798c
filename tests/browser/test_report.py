"""`penstock report` in a browser: from a file, with a model's hostile words in it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from benchmarks.chromium import Chromium, Page
from benchmarks.made_run import write_made_run
from penstock.observe.events import TokenTexts
from penstock.observe.reading.run_reading import RunReading
from penstock.page.report_page import write_report
from tests.browser.shown_page import READY, go, says, words
from tests.observe.examples import TOKENS, phase, run_event, step
from tests.observe.hostile import HOSTILE
from tests.observe.store.written import read, sample, write

SAYS = {
    "findings": "9% of all groups were dropped",
    "samples": "200 of 252 kept samples",
    "samples?step=30..40&sort=best": "22 of 252 kept samples",
    "samples?drop=stale": "12 of 252 kept samples",
    "tokens": "Choose an answer",
    "now": "The run has ended",
    "time": "wait",
    "staleness": "aged while generating",
    "drops": "12 groups",
    "drops?reason=stale": "12 groups",
    "timeline": "Point at a span",
    "metrics": "staleness_mean",
    "machine": "engine0",
    "config": "made",
    "group/9999999": "penstock view shows the whole run",
}


@contextlib.asynccontextmanager
async def opened(browser: int, path: Path, width: int = 1280) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as session, Chromium(browser, session).new_page(width, 900) as page:
        await page.open(path.as_uri())
        await page.until(READY)
        yield page
        assert [url for url in page.requests if not url.startswith("file://")] == []
        assert page.console == []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunReading(write_made_run(tmp_path_factory.mktemp("runs") / "made", steps=120))
    run.refresh()
    return write_report(run)


@pytest.mark.smoke
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_draws_without_a_server(browser: int, report: Path, width: int) -> None:
    async def main() -> None:
        async with opened(browser, report, width) as page:
            await says(page, "120 of 120 steps")
            for place, text in SAYS.items():
                await go(page, place)
                await says(page, text)
                assert await page.run("document.documentElement.scrollWidth - innerWidth") <= 0, place
            await go(page, "metrics")
            await page.until("document.querySelector('.chart').chart.columns[0].length === 120")
            await go(page, "findings")
            await page.run(
                "[...document.querySelectorAll('#view a')].find((one) => one.innerText === 'Its tokens').click()"
            )
            await page.until("document.querySelector('.view[data-view=tokens][data-ready] .token-detail dl')")

    asyncio.run(main())


def test_hostile_words_do_nothing(browser: int, tmp_path: Path) -> None:
    told = TokenTexts(process="controller", time=101.0, texts={7: HOSTILE[0], 8: HOSTILE[1], 9: HOSTILE[2]})
    samples = [
        sample(number, prompt=text, answer=text * 40, traced=number == 0)
        for number, text in enumerate(HOSTILE)
    ]
    tokens = msgspec.structs.replace(TOKENS, group=0)
    write(tmp_path, [run_event(), phase("training", 100.5), told, *samples, tokens, step(2, 104.0)])
    path = write_report(read(tmp_path))

    async def main() -> None:
        async with opened(browser, path) as page:
            for place in ("findings", "samples?row=1", "group/1", "tokens/0"):
                await go(page, place)
                assert (
                    await page.run(
                        "document.querySelectorAll('#view img, #view script, #view iframe').length"
                    )
                    == 0
                )
                assert await page.run("document.title") == "2/9 · demo · penstock"
            await go(page, "group/1")
            text = await words(page)
            assert "onerror=" in text and "\x1b" not in text and "\u202e" not in text

    asyncio.run(main())
