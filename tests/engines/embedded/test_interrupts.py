"""Every way to interrupt: labels and logprobs are those of the weights that sampled each token."""

import asyncio
import copy
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.errors import PenstockError
from penstock.records import Interrupt, Parent, UpdateReceipt, WeightUpdate, since_restart
from tests.engines.contract import ask, update_to
from tests.engines.embedded.test_exact import plain_table, play_move
from tests.engines.embedded.test_swaps import Shadow, any_engine, replay
from tests.engines.embedded.tiny import Driver, SeededWeights, make_engine, serve

EVERY: Sequence[Interrupt] = get_args(Interrupt)
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [1, 2, 3]]


def make(weights: SeededWeights, **options: Any) -> EmbeddedEngine:
    return make_engine(copy.deepcopy(weights.model(0)), receiver=weights, **options)


async def update(driver: Driver, interrupt: Interrupt, to: WeightUpdate | None = None) -> UpdateReceipt:
    """Steps are taken until the engine has the update, as its own loop would."""
    to = to or update_to(driver.engine.versions["policy"] + 1)
    taking = asyncio.create_task(driver.engine.update(to, interrupt))
    await asyncio.sleep(0)
    while not taking.done():
        await driver.step()
    return taking.result()


async def answers_across(
    engine: EmbeddedEngine, interrupt: Interrupt, *, known: int = 6, late: bool = False
) -> tuple[Driver, UpdateReceipt]:
    """Three requests of which so many tokens each are known when new weights come; one more comes with them if
    `late`."""
    driver = Driver(engine)
    for number, prompt in enumerate(PROMPTS):
        await driver.start(ask(str(number), prompt, max_tokens=12, seed=number, chunk_tokens=4))
    while min(seq.num_output for seq in engine._scheduler.live()) < known:
        await driver.step()
    taking = asyncio.create_task(update(driver, interrupt))
    if late:
        await asyncio.sleep(0)
        await driver.start(ask("late", [4, 4], max_tokens=5, seed=9))
    receipt = await taking
    await driver.drain()
    for name in driver.chunks:
        driver.chunks[name] = list(since_restart(driver.chunks[name]))
    return driver, receipt


def check_labels(driver: Driver, weights: SeededWeights, rebuilt: set[int]) -> None:
    for name, request in driver.requests.items():
        output, versions = driver.output(name), driver.versions(name)
        expected = replay(weights, request.token_ids.tolist(), output, versions, rebuilt)
        torch.testing.assert_close(driver.logprobs(name), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("interrupt", "kv", "versions", "rebuilt"),
    [
        ("inflight", "keep", [0] * 6 + [1] * 6, set()),
        ("inflight_recompute", "keep", [0] * 6 + [1] * 6, {1}),
        ("abort_resume", "keep", [0] * 6 + [1] * 6, set()),
        ("abort_resume", "recompute", [0] * 6 + [1] * 6, {1}),
        ("abort_retry", "keep", [1] * 12, set()),
        ("drain", "keep", [0] * 12, set()),
    ],
)
def test_what_becomes_of_answers_in_flight(
    interrupt: Interrupt, kv: str, versions: list[int], rebuilt: set[int]
) -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver, receipt = await answers_across(make(weights, resume_kv=kv), interrupt)
        assert {name: driver.versions(name) for name in driver.requests} == dict.fromkeys("012", versions)
        check_labels(driver, weights, rebuilt)
        computed = sum(len(prompt) + 5 for prompt in PROMPTS)
        assert receipt.recomputed_tokens == (computed if rebuilt else 0)
        assert receipt.discarded_tokens == (3 * 6 if interrupt == "abort_retry" else 0)
        assert (receipt.drain_s > 0) == (interrupt == "drain")
        counters = (await driver.engine.report()).counters
        assert counters["recomputed_tokens"] == receipt.recomputed_tokens
        assert counters["discarded_tokens"] == receipt.discarded_tokens
        assert counters["drain_s"] == receipt.drain_s

    asyncio.run(main())


def test_requests_that_come_while_an_engine_drains_begin_with_the_new_weights() -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver, _ = await answers_across(make(weights), "drain", late=True)
        assert driver.versions("late") == [1] * 5
        check_labels(driver, weights, set())

    asyncio.run(main())


def test_requests_that_have_not_begun_are_not_drained() -> None:
    """A queue longer than the batch would make new weights wait for all of it."""
    weights = SeededWeights("llama")

    async def main() -> None:
        driver = Driver(make(weights, max_batch=2))
        for number in range(5):
            await driver.start(ask(str(number), [number + 1], max_tokens=6, seed=number))
        await driver.step()
        assert (await driver.engine.report()).num_waiting == 3
        await update(driver, "drain")
        await driver.drain()
        assert [driver.versions(str(n)) for n in range(5)] == [[0] * 6] * 2 + [[1] * 6] * 3

    asyncio.run(main())


def test_an_answer_that_begins_again_says_so_in_its_next_chunk() -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver = Driver(make(weights))
        await driver.start(ask("sent", max_tokens=8, seed=1, chunk_tokens=2))
        await driver.start(ask("unsent", [7], max_tokens=8, seed=2, chunk_tokens=8))
        for _ in range(5):
            await driver.step()
        await update(driver, "abort_retry")
        await driver.drain()
        assert [chunk.restarts for chunk in driver.chunks["sent"]] == [False] * 2 + [True] + [False] * 3
        assert [chunk.restarts for chunk in driver.chunks["unsent"]] == [False]
        driver.chunks["sent"] = list(since_restart(driver.chunks["sent"]))
        assert driver.versions("sent") == driver.versions("unsent") == [1] * 8

    asyncio.run(main())


def test_masks_of_tokens_that_were_thrown_away_are_gone() -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver = Driver(make(weights))
        await driver.start(ask("a", max_tokens=6, seed=1, top_k=5, record_sampling_mask=True))
        for _ in range(4):
            await driver.step()
        await update(driver, "abort_retry")
        await driver.drain()
        driver.chunks["a"] = list(since_restart(driver.chunks["a"]))
        masks = driver.masks("a")
        assert [len(kept) for kept in masks] == [5] * 6
        assert all(token in kept for token, kept in zip(driver.output("a"), masks, strict=True))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("interrupt", "reads_old"), [("inflight", True), ("drain", False), ("abort_retry", False)]
)
def test_a_later_turn_reads_what_older_weights_computed_only_where_that_is_kept(
    interrupt: Interrupt, reads_old: bool
) -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver = Driver(make(weights))
        await driver.start(ask("first", [5, 6, 7], max_tokens=6, seed=1))
        await driver.drain()
        await update(driver, interrupt)
        turns = [5, 6, 7, *driver.output("first"), 9]
        await driver.start(ask("second", turns, max_tokens=5, seed=2, parent=Parent(id="first", keep=8)))
        await driver.drain()
        assert driver.versions("second") == [1] * 5
        fresh = replay(weights, turns, driver.output("second"), [1] * 5, set())
        differs = (driver.logprobs("second") - fresh).abs().max() > 1e-3
        assert bool(differs) == reads_old

    asyncio.run(main())


def test_a_cancelled_drain_lets_requests_go() -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        async with asyncio.timeout(60), serve(copy.deepcopy(weights.model(0)), receiver=weights) as engine:
            running = engine.generate(ask("a", max_tokens=50, seed=1))
            await anext(running)
            taking = asyncio.create_task(engine.update(update_to(1), "drain"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            chunks = [chunk async for chunk in engine.generate(ask("b", max_tokens=3))]
            assert [int(v) for chunk in chunks for v in chunk.versions] == [0, 0, 0]
            await running.aclose()  # type: ignore[attr-defined]
            assert (await engine.update(update_to(1), "drain")).version == 1

    asyncio.run(main())


def test_a_drain_ends_when_the_last_request_is_cancelled() -> None:
    async def main() -> None:
        weights = SeededWeights("llama")
        async with asyncio.timeout(60), serve(copy.deepcopy(weights.model(0)), receiver=weights) as engine:
            running = engine.generate(ask("a", max_tokens=100, seed=1))
            await anext(running)
            taking = asyncio.create_task(engine.update(update_to(1), "drain"))
            await asyncio.sleep(0)
            assert not taking.done()
            await running.aclose()  # type: ignore[attr-defined]
            assert (await taking).version == 1
            await asyncio.sleep(0)

    asyncio.run(main())


def test_closing_ends_a_drain_and_those_that_wait_for_it() -> None:
    async def main() -> None:
        driver = Driver(make(SeededWeights("llama")))
        await driver.start(ask("a", max_tokens=30, seed=1))
        await driver.step()
        taking = asyncio.create_task(driver.engine.update(update_to(1), "drain"))
        await asyncio.sleep(0)
        await driver.start(ask("held", max_tokens=3))
        assert (await driver.engine.report()).num_waiting == 1
        await driver.engine.close()
        with pytest.raises(PenstockError, match="engine0 is closed"):
            await taking
        await driver.drain()
        assert driver.chunks["held"][-1].finish_reason == "cancelled"

    asyncio.run(main())


LONG = [(5 * n) % 61 for n in range(24)]


@pytest.mark.parametrize("interrupt", ["inflight", "abort_resume"])
@pytest.mark.parametrize(
    ("prompts", "recomputed"),
    [([LONG[::-1]], 7), ([LONG[::-1]] * 3, 7), ([LONG], 19)],
    ids=["alone", "shared by a group", "begun with cached blocks"],
)
def test_prompts_that_an_update_finds_half_computed_are_computed_again(
    interrupt: Interrupt, prompts: list[list[int]], recomputed: int
) -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver = Driver(make(weights, prefill_chunk=7))
        await driver.start(ask("before", LONG[:13], max_tokens=1))
        await driver.drain()
        for number, prompt in enumerate(prompts):
            await driver.start(ask(str(number), prompt, max_tokens=6, seed=number))
        await driver.step()
        assert len(driver.engine._scheduler.running) == len(prompts)
        assert (await update(driver, interrupt)).recomputed_tokens == recomputed
        await driver.drain()
        for number in range(len(prompts)):
            assert driver.versions(str(number)) == [1] * 6
            assert driver.mixed(str(number)) == [False] * 6
        check_unmixed(driver, weights)

    asyncio.run(main())


def test_a_prompt_is_computed_again_once_and_what_straddles_the_next_update_is_said() -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver = Driver(make(weights, prefill_chunk=7))
        await driver.start(ask("a", LONG, max_tokens=4, seed=1))
        for recomputed in (7, 0, 0):
            await driver.step()
            assert (await update(driver, "inflight")).recomputed_tokens == recomputed
        await driver.drain()
        assert driver.versions("a") == [3] * 4
        assert driver.mixed("a") == [True] * 4

    asyncio.run(main())


def test_a_later_turn_that_reads_what_older_weights_computed_says_so() -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        driver = Driver(make(weights, prefill_chunk=7))
        await driver.start(ask("first", LONG[:9], max_tokens=3, seed=1))
        await driver.drain()
        turns = [*LONG[:9], *driver.output("first"), *LONG]
        await driver.start(ask("second", turns, max_tokens=3, seed=2, parent=Parent(id="first", keep=12)))
        await driver.step()
        assert (await update(driver, "inflight")).recomputed_tokens == 0
        await driver.drain()
        assert driver.versions("second") == [1] * 3
        assert driver.mixed("second") == [True] * 3
        await driver.start(ask("anew", turns, max_tokens=3, seed=2))
        await driver.drain()
        assert driver.mixed("anew") == [False] * 3
        check_unmixed(driver, weights)

    asyncio.run(main())


def check_unmixed(driver: Driver, weights: SeededWeights) -> None:
    """Tokens that read nothing of other weights are those of one plain pass with the weights of their version."""
    for name in driver.finished():
        prompt, output = driver.requests[name].token_ids.tolist(), driver.output(name)
        logprobs, mixed, versions = driver.logprobs(name), driver.mixed(name), driver.versions(name)
        tables = {version: plain_table(weights.model(version), prompt, output) for version in set(versions)}
        for at, version in enumerate(versions):
            if not mixed[at]:
                assert abs(float(logprobs[at] - tables[version][at, output[at]])) < 1e-4, (name, at)


async def play_with_interrupts(
    engine: EmbeddedEngine, data: st.DataObject, weights: SeededWeights | None = None
) -> None:
    """Any moves and any updates; no label goes back, and where nothing of older weights is kept, an answer has one."""
    driver = Driver(engine)
    used: set[str] = set()
    for _ in range(data.draw(st.integers(1, 8), label="moves")):
        await play_move(driver, data)
        if data.draw(st.booleans(), label="update"):
            interrupt = data.draw(st.sampled_from(EVERY), label="interrupt")
            used.add(interrupt)
            await update(driver, interrupt)
    await driver.drain()
    for name in driver.finished():
        driver.chunks[name] = list(since_restart(driver.chunks[name]))
        versions = driver.versions(name)
        assert versions == sorted(versions)
        assert len(versions) <= driver.requests[name].sampling.max_tokens
        if used <= {"drain", "abort_retry"}:
            assert len(set(versions)) == 1
        if used.isdisjoint(("inflight", "abort_resume")):
            assert not any(driver.mixed(name))
    if weights is not None:
        check_unmixed(driver, weights)
    driver.check_nothing_is_held()


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_schedule_under_any_interrupts_equals_a_replay(data: st.DataObject) -> None:
    weights = SeededWeights("llama")

    async def main() -> None:
        engine = any_engine(weights, data, resume_kv=data.draw(st.sampled_from(["keep", "recompute"])))
        Shadow(engine, weights)
        await play_with_interrupts(engine, data, weights)

    asyncio.run(main())
