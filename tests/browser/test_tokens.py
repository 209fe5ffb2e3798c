"""The tokens of an answer in Chromium: colours, seams, the worst token; 32,768 of them in time."""

from benchmarks.chromium import Page
from tests.browser.shown_page import go, look, words
from tests.page.fake_run import FakeRun

LONG = 32_768
ROW = 16
"""A sample whose tokens are kept."""


def test_each_colouring_paints_and_the_seam_shows(browser: int) -> None:
    async def scene(page: Page) -> None:
        await go(page, f"tokens/{ROW}")
        assert await page.run("[...document.querySelectorAll('.seam')].map((one) => one.textContent)") == [
            "v1"
        ]
        for key, names in {"v": "c", "e": "s", "r": "s", "d": "n", "i": "clip", "a": "p"}.items():
            await page.press(key)
            painted = await page.run("[...CSS.highlights.keys()]")
            assert any(name.startswith(names) for name in painted), (key, painted)
            assert "masked" in painted
        await page.press("w")
        assert "20 of 40" in await words(page, ".token-detail")
        assert "−1.70" in await words(page, ".token-detail")
        await page.press("ArrowRight")
        assert "21 of 40" in await words(page, ".token-detail")

    look(browser, scene, [FakeRun()])


def test_many_tokens_open_within_a_second_and_recolour_in_a_fifth(browser: int) -> None:
    run = FakeRun()
    run.num_tokens = LONG
    frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"

    async def scene(page: Page) -> tuple[float, float]:
        await page.run("document.querySelector('#view .view').removeAttribute('data-ready')")
        opened = await page.run(
            f"""(async () => {{
                const begun = performance.now();
                location.hash = '#/tokens/{ROW}';
                while (!document.querySelector('.view[data-view=tokens][data-ready] .token-text')) await new Promise((done) => setTimeout(done, 5));
                await {frames};
                return performance.now() - begun;
            }})()"""
        )
        times = []
        for label in ("Gap", "Engine logprob", "Advantage", "Version", "Gap"):
            times.append(
                await page.run(
                    f"""(async () => {{
                        const begun = performance.now();
                        [...document.querySelectorAll('.choice button')].find((one) => one.textContent === '{label}').click();
                        await {frames};
                        return performance.now() - begun;
                    }})()"""
                )
            )
        return float(opened) / 1000, sorted(times)[len(times) // 2] / 1000

    opened_s, recolour_s = look(browser, scene, [run])
    print(f"{LONG} tokens: opened in {opened_s:.3f} s, recoloured in {recolour_s:.3f} s")
    assert opened_s <= 1.0
    assert recolour_s <= 0.2
