"""The pictures of the web page in README and docs, taken from a real run:

python tools/page_pictures.py            # trains the demo, then opens its page in Chromium
python tools/page_pictures.py RUN RUN2   # of runs that are there
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chromium import Page, chromium
from penstock.observe.page_address import bind, new_token, page_address
from penstock.observe.reading.run_reading import RunReading
from penstock.page.serving_page import served_page

IMAGES = Path(__file__).parent.parent / "docs" / "images"
READY = "document.querySelector('#view .view[data-ready]')"
WIDTH, HEIGHT = 1280, 800
STEPS = 120
WINDOW_S = 3.0
"""Of the timeline: few enough rollouts for their arrows."""


def train(folder: Path) -> Path:
    """The demo, with longer answers than it needs: some tokens see several versions."""
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "train"]
    settings = [f"run.steps={STEPS}", f"run.folder={folder}", "observe.view=plain", "observe.dashboard=false"]
    subprocess.run([*command, *settings], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return next(path.parent for path in folder.glob("*/events"))


async def take(runs: Sequence[Path], folder: Path) -> None:
    token = new_token()
    with bind("127.0.0.1", 0) as listening:
        async with (
            served_page([RunReading(run) for run in runs], listening, token=token),
            chromium() as browser,
            browser.new_page(WIDTH, HEIGHT) as page,
        ):
            await page.open(page_address(listening, token))
            await page.until(READY)
            for name, place, keys in await places(page):
                await show(page, place, keys)
                await page.picture(folder / f"page-{name}.png")


async def places(page: Page) -> list[tuple[str, str, Sequence[str]]]:
    """Names of pictures, where they are taken, and keys to press there."""
    longest = await ask(
        page, "traced", "rows.sort((a, b) => b.newest - b.oldest - (a.newest - a.oldest))[0].row"
    )
    middle = await ask(page, "now", "now_s") * 0.7
    return [
        ("samples", "samples", ("j", "j", "Enter")),
        ("tokens", f"tokens/{longest:.0f}?by=engine", ("w",)),
        ("time", "time", ()),
        ("staleness", "staleness", ()),
        ("timeline", f"timeline?time={middle:.1f}..{middle + WINDOW_S:.1f}", ()),
    ]


async def ask(page: Page, name: str, part: str) -> float:
    """A number that the server knows, as the page asks for it."""
    headers = "{headers: {'X-Penstock-Token': sessionStorage.getItem('penstock-token')}}"
    script = f"""fetch('api/run/0/{name}', {headers})
        .then((found) => found.json()).then(({{rows, now_s}}) => {part})"""
    return float(await page.run(script))


async def show(page: Page, place: str, keys: Sequence[str]) -> None:
    await page.run("document.querySelector('#view .view').removeAttribute('data-ready')")
    await page.run(f"location.hash = '#/{place}'; dispatchEvent(new Event('hashchange'))")
    await page.until(READY)
    for key in keys:
        await page.press(key)
    await page.run("new Promise((done) => setTimeout(done, 1000))")  # charts come a moment later


def main(arguments: Sequence[str]) -> None:
    if arguments:
        asyncio.run(take([Path(run) for run in arguments], IMAGES))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(take([train(Path(folder))], IMAGES))


if __name__ == "__main__":
    main(sys.argv[1:])
