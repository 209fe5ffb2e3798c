"""`penstock report` in a browser: from a file, with a model's hostile words in it."""

import asyncio
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.chromium import Chromium
from penstock.observe.events import TokenTexts
from penstock.observe.report.run_report import write_report
from tests.observe.examples import TOKENS, phase, run_event, step
from tests.observe.report.hostile import HOSTILE
from tests.observe.store.written import read, sample, write


def test_hostile_words_do_nothing_and_the_page_fits(browser: int, tmp_path: Path) -> None:
    words = {7: HOSTILE[0], 8: HOSTILE[1], 9: HOSTILE[2]}
    samples = [
        sample(number, prompt=text, answer=text * 40, traced=number == 0)
        for number, text in enumerate(HOSTILE)
    ]
    tokens = msgspec.structs.replace(TOKENS, group=0)
    told = TokenTexts(process="controller", time=101.0, texts=words)
    write(tmp_path, [run_event(), phase("training", 100.5), told, *samples, tokens, step(2, 104.0)])
    path = write_report(read(tmp_path))

    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            for width in (1280, 390):
                async with Chromium(browser, session).new_page(width, 900) as page:
                    await page.open(path.as_uri())
                    await page.until(
                        "document.readyState === 'complete' && document.querySelector('.sample')"
                    )
                    assert await page.run("document.title") == "demo · penstock report"
                    assert await page.run("document.querySelectorAll('script, img, a, iframe').length") == 0
                    assert await page.run("document.documentElement.scrollWidth") <= width
                    assert "onerror=" in await page.run("document.body.innerText")
                    assert [url for url in page.requests if not url.startswith("file://")] == []
                    assert page.console == []

    asyncio.run(main())
