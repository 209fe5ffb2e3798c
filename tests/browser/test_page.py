"""The page in Chromium: every view opens, keys work, text is text, and nothing comes from elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote_plus

import msgspec
import pytest

from benchmarks.chromium import Page
from tests.browser.shown_page import TOKEN, go, says, shown, words
from tests.page.fake_run import FakeRun

VIEWS = (
    "now",
    "samples",
    "tokens",
    "time",
    "staleness",
    "drops",
    "timeline",
    "compare",
    "metrics",
    "machine",
    "config",
)
SAYS = {
    "samples": "640 of 640 kept samples",
    "tokens": "Choose an answer",
    "now": "Limited by engines",
    "time": "wait: generation",
    "staleness": "aged while generating",
    "drops": "40 groups, 800 tokens",
    "timeline": "Point at a span",
    "compare": "penstock view RUN RUN2",
    "metrics": "staleness_mean",
    "machine": "memory_bytes",
    "config": "max_staleness",
}


def look(
    browser: int, scene: Callable[[Page], Awaitable[Any]], runs: Sequence[Any] = (), **options: Any
) -> Any:
    async def main() -> Any:
        async with shown(browser, runs, **options) as page:
            found = await scene(page)
            assert page.console == []
            return found

    return asyncio.run(main())


@pytest.mark.smoke
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_view_opens_and_nothing_runs_over_the_edge(browser: int, width: int, dark: bool) -> None:
    async def scene(page: Page) -> None:
        for view in VIEWS:
            await go(page, view)
            await says(page, SAYS[view])
            assert await page.run("document.documentElement.scrollWidth - innerWidth") <= 0, view
        paper = await page.run("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")

    look(browser, scene, width=width, dark=dark)


def test_nothing_is_asked_of_anybody_else_and_the_token_is_in_no_address(browser: int) -> None:
    async def scene(page: Page) -> tuple[list[str], str]:
        for view in VIEWS:
            await go(page, view)
        return page.requests, str(await page.run("location.href"))

    requests, address = look(browser, scene)
    assert len(requests) > 30
    assert {request.split("/")[2].split(":")[0] for request in requests} == {"127.0.0.1"}
    assert all(TOKEN not in request for request in requests) and TOKEN not in address


def test_what_a_model_wrote_is_text_everywhere(browser: int) -> None:
    async def scene(page: Page) -> None:
        for place in ("samples?row=3", "group/4", "tokens/3", "now", "drops", "compare?task=1"):
            await go(page, place)
            assert "<script>" in await words(page) or place.startswith("compare"), place
            inside = "document.querySelectorAll('#view img, #view script, #view b > b, #view a[href^=javascript]').length"
            assert await page.run(inside) == 0, place
            assert await page.run("document.title") != "owned"
            shown_text = await words(page)
            assert "\x1b" not in shown_text and "\u202e" not in shown_text
        assert "\\x1b[31mred" in await words_of(page, "now")

    async def words_of(page: Page, place: str) -> str:
        await go(page, place)
        return await words(page)

    look(browser, scene, [FakeRun()])


def test_every_turn_is_shown_with_its_role(browser: int) -> None:
    async def scene(page: Page) -> None:
        for place in ("samples?row=2&sort=old", "group/5"):
            await go(page, place)
            await page.until("document.querySelectorAll('.read pre').length === 2")
            titles = await page.run(
                "[...document.querySelectorAll('.text h3')].map((one) => one.innerText).join()"
            )
            assert "Turn 1: context,Turn 1: model,Turn 2: context,Turn 2: model" in titles
            assert "<|tool|>84<|end|><|model|>" in await words(page)

    look(browser, scene)


def test_markup_can_not_be_made_even_by_mistake(browser: int) -> None:
    async def main() -> tuple[str, list[str]]:
        async with shown(browser) as page:
            script = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch { return 'refused'; } })()"
            return str(await page.run(script)), page.console

    made, _ = asyncio.run(main())
    assert made == "refused"


def test_without_the_token_there_is_only_a_field_for_it(browser: int) -> None:
    async def main() -> str:
        async with shown(browser) as page:
            await page.run("sessionStorage.clear()")
            await page.open(str(await page.run("location.origin")) + "/#/now")
            await page.run("location.reload()")
            await page.until("document.querySelector('form.token')")
            return await words(page)

    assert "This page needs its token" in asyncio.run(main())


def test_keys_lead_everywhere(browser: int) -> None:
    async def scene(page: Page) -> None:
        for key, view in zip("123456789", VIEWS, strict=False):
            await page.press(key)
            await page.until(f"document.querySelector('.view[data-view={view}][data-ready]')")
        await go(page, "samples")
        await page.press("p")
        await page.until(
            "location.hash.includes('step=40') && document.querySelector('.view[data-ready] .chip')"
        )
        await page.press("j")
        await page.press("j")
        assert await page.run("document.activeElement.closest('.item').dataset.row") == "634"
        await page.press("Enter")
        await page.until("document.querySelector('.item .opened pre')")
        await page.press("g")
        await page.until("document.querySelector('.view[data-view=group][data-ready] .attempt')")
        await page.press("?")
        await says(page, "next attempt", "dialog")
        await page.press("Escape")
        await page.press("t")
        assert await page.run("document.documentElement.dataset.theme") == "dark"

    look(browser, scene)


def test_the_page_opens_on_now_with_the_held_out_curve(browser: int) -> None:
    run = FakeRun()

    async def scene(page: Page) -> None:
        assert await page.run("location.hash") == "#/now"
        charts = "[...document.querySelectorAll('.chart')].filter((one) => !one.hidden).map((one) => one.ariaLabel)"
        assert (await page.run(charts))[:2] == ["Reward of each step", "Held-out reward"]
        await says(page, "last 8 steps", ".facts")
        run.evaluations.append(msgspec.structs.replace(run.evaluations[0], step=40, reward=0.71))
        run.add_step()
        drawn = "document.querySelectorAll('.chart')[1].chart.lines[0]"
        await page.until(f"{drawn}.x.join() === '0,40' && {drawn}.y.join() === '0.26,0.71'")
        run.evaluations.clear()
        await go(page, "now")
        assert "Held-out reward" not in await page.run(charts)

    look(browser, scene, [run])


def test_equal_rewards_are_one_chart(browser: int) -> None:
    run = FakeRun()
    reward = run.steps.column("reward")
    run.steps.names += ["reward_mean", "reward_exact_match"]
    run.steps._columns |= {"reward_mean": reward, "reward_exact_match": reward}

    async def scene(page: Page) -> None:
        await go(page, "metrics?find=exact")
        titles = "[...document.querySelectorAll('.chart')].map((one) => one.ariaLabel)"
        assert await page.run(titles) == ["reward = reward_mean = reward_exact_match"]

    look(browser, scene, [run])


def test_a_bar_opens_its_samples(browser: int) -> None:
    async def scene(page: Page) -> None:
        await go(page, "samples")
        run = FakeRun()
        right = int((run.samples.columns["reward"] == 1).sum())
        await page.run(
            "[...document.querySelectorAll('.histogram')][0].querySelector('.bar:last-child').click()"
        )
        await page.until(f"document.body.innerText.includes('{right} of 640 kept samples')")
        await page.run("document.querySelector('.chip').click()")
        await page.until("document.body.innerText.includes('640 of 640 kept samples')")
        await page.run("[...document.querySelectorAll('.reason')].at(-1).click()")
        await page.until("document.body.innerText.includes('160 of 640 kept samples')")

    look(browser, scene)


def test_steps_arrive_while_the_run_goes_on(browser: int) -> None:
    run = FakeRun()

    async def scene(page: Page) -> None:
        await go(page, "now")
        await page.until("document.querySelector('.chart .u-wrap canvas')")
        for step in (41, 42, 43):
            run.add_step()
            await page.until(f"document.querySelector('.facts').innerText.includes('{step} / 200')")
        last = "document.querySelector('.chart').chart.columns[0].at(-1)"
        assert await page.run(last) == 43

    look(browser, scene, [run])


def test_two_runs_are_compared(browser: int) -> None:
    one, two = FakeRun("one"), FakeRun("two", 20)
    two.config["staleness"]["max_staleness"] = 0
    task = one.samples.task_names[1]
    two.samples.task_names[1] = task

    async def scene(page: Page) -> None:
        await go(page, "samples?run=1")
        await says(page, "320 of 320 kept samples")
        await go(page, f"compare?task={quote_plus(task)}")
        await page.until("document.querySelectorAll('.chart canvas').length >= 3")
        await page.until("document.querySelectorAll('.attempt').length === 2")
        await says(page, "staleness.max_staleness")
        for step in (21, 22):  # the second goes on while both are shown
            two.add_step()
            await page.until(f"document.querySelector('.chart').chart.lines[1].x.at(-1) === {step}")
        assert await page.run("document.querySelector('.chart').chart.lines[0].x.at(-1)") == 40

    look(browser, scene, [one, two])
