import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from penstock.engines.embedded.scheduler import Batch
from penstock.errors import NonFiniteLogits, PenstockError, RequestRefused
from penstock.records.interfaces import Engine
from tests.engines.capability_contract import CapabilityContract, Stage
from tests.engines.contract import EngineContract, ask, collect, joined, update_to
from tests.engines.embedded.test_outbox import Letters
from tests.engines.embedded.tiny import VOCAB, Driver, make_engine, make_model, serve


class TestContract(EngineContract):
    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with serve(max_context=64) as engine:
            yield engine


class Alphabet(Letters):
    """Every token is one letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


class TestCapabilities(CapabilityContract):
    @asynccontextmanager
    async def open_stage(self) -> AsyncIterator[Stage]:
        async with serve(max_context=64, tokenizer=Alphabet()) as engine:
            yield Stage(engine, make_model(), Alphabet().decode)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_logits_that_are_not_finite_fail_their_request_and_are_counted(options: dict[str, float]) -> None:
    """Nothing can be drawn from NaN: the answer must not be token 0 for ever."""

    async def main() -> None:
        async with serve() as engine:
            forward = engine._runner.forward

            def overflowing(batch: Batch) -> torch.Tensor:
                logits = forward(batch).clone()
                for row, (seq, _, _) in enumerate(batch.spans):
                    if seq.request.id == "bad" and seq.num_output == 2:
                        logits[row] = torch.inf
                return logits

            engine._runner.forward = overflowing  # type: ignore[method-assign]
            broken, right = await asyncio.gather(
                collect(engine.generate(ask("bad", max_tokens=5, **options))),
                collect(engine.generate(ask("good", max_tokens=5, **options))),
                return_exceptions=True,
            )
            assert isinstance(broken, NonFiniteLogits)
            assert str(broken).startswith(
                "request 'bad' failed after 2 tokens: the model's logits are not finite"
            )
            assert not isinstance(right, BaseException)
            assert sum(len(chunk.token_ids) for chunk in right) == 5
            report = await engine.report()
            assert report.counters["nonfinite_logits"] == 1
            assert report.num_running == 0

    asyncio.run(main())


def test_sequences_are_generated_one_at_a_time_where_a_run_must_repeat() -> None:
    """With `max_batch=1`, as `run.deterministic` sets it, no bit of an answer depends on others."""

    async def batches(names: list[str]) -> list[list[str]]:
        seen: list[list[str]] = []
        async with serve(max_batch=1, prefix_cache=False) as engine:
            forward = engine._runner.forward

            def watched(batch: Batch) -> torch.Tensor:
                seen.append([seq.request.id for seq, _, _ in batch.spans])
                return forward(batch)

            engine._runner.forward = watched  # type: ignore[method-assign]
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    tasks.create_task(collect(engine.generate(ask(name, max_tokens=3))))
        return seen

    found = asyncio.run(batches(["g1.0", "g1.1", "g2.0"]))
    assert {name for batch in found for name in batch} == {"g1.0", "g1.1", "g2.0"}
    assert all(len(batch) == 1 for batch in found)


def test_an_error_in_a_step_fails_every_request_and_leaves_the_loop() -> None:
    async def main() -> None:
        engine = make_engine(make_model())

        def broken(batch: object) -> torch.Tensor:
            raise RuntimeError("the forward pass broke")

        engine._runner.forward = broken  # type: ignore[method-assign]
        running = asyncio.create_task(engine.run())
        answers = await asyncio.gather(
            *(collect(engine.generate(ask(name))) for name in "abc"), return_exceptions=True
        )
        assert [str(answer) for answer in answers] == ["the forward pass broke"] * 3
        with pytest.raises(RuntimeError, match="broke"):
            await running
        with pytest.raises(Exception, match="engine0 has failed: the forward pass broke"):
            await collect(engine.generate(ask("d")))

    asyncio.run(main())


def test_stopping_the_loop_wakes_its_requests() -> None:
    async def main() -> None:
        engine = make_engine(make_model())
        running = asyncio.create_task(engine.run())
        chunks = engine.generate(ask("a", max_tokens=100))
        await anext(chunks)
        running.cancel()
        with pytest.raises(PenstockError, match="engine0 was stopped"):
            await collect(chunks)
        assert running.cancelled()

    asyncio.run(main())


def test_a_request_too_large_for_the_cache_is_refused() -> None:
    async def main() -> None:
        engine = make_engine(make_model(), kv_tokens=32)
        with pytest.raises(RequestRefused, match="may grow to 43 tokens and the cache holds 32"):
            await collect(engine.generate(ask("a", max_tokens=40)))
        assert (await engine.report()).num_waiting == 0

    asyncio.run(main())


def test_the_report_counts_what_was_computed_and_what_was_not() -> None:
    async def main() -> None:
        driver = Driver(make_engine(make_model(), kv_tokens=64, keep_finished=0, prefix_cache=False))
        for name in "abcd":
            await driver.start(ask(name, [1, 2, 3, 4, 5], max_tokens=4))
        await driver.drain()
        report = await driver.engine.report()
        assert report.counters["prefill_tokens"] == 5
        assert report.counters["cached_tokens"] == 15
        assert report.counters["tokens"] == 16
        assert report.counters["steps"] == 4
        assert report.counters["preemptions"] == 0
        assert report.counters["free_blocks"] == report.counters["num_blocks"] == 16
        assert report.max_context == 128
        assert "stop_strings" not in report.capabilities

    asyncio.run(main())


def test_preemptions_are_counted_and_change_nothing() -> None:
    async def tokens(**options: int) -> tuple[list[list[int]], float]:
        driver = Driver(make_engine(make_model(), **options))
        for number in range(4):
            await driver.start(ask(str(number), [number, 1, 2], max_tokens=20, seed=number))
        await driver.drain()
        counters = (await driver.engine.report()).counters
        return [driver.output(str(number)) for number in range(4)], counters["preemptions"]

    ample, none = asyncio.run(tokens())
    scarce, some = asyncio.run(tokens(kv_tokens=40))
    assert none == 0
    assert some > 0
    assert scarce == ample


def test_stop_strings_end_a_request() -> None:
    async def main() -> None:
        driver = Driver(make_engine(make_model(), tokenizer=Letters()))
        bias = dict.fromkeys(range(5, VOCAB), -1000000000.0)
        await driver.start(ask("a", max_tokens=60, stop=("ba",), seed=1, logit_bias=bias))
        await driver.drain()
        text = Letters().decode(driver.output("a"))
        assert "ba" in text
        assert "ba" not in Letters().decode(driver.output("a")[:-1])
        assert driver.chunks["a"][-1].finish_reason == "stop"
        assert "stop_strings" in (await driver.engine.report()).capabilities

    asyncio.run(main())


def test_recorded_masks_explain_the_logprobs() -> None:
    async def main() -> None:
        reference = make_model()
        driver = Driver(make_engine(make_model()))
        options = {"max_tokens": 12, "top_p": 0.8, "temperature": 0.9, "record_sampling_mask": True}
        await driver.start(ask("a", [4, 5, 6], seed=3, chunk_tokens=5, **options))
        await driver.start(ask("b", [4, 5, 6], seed=4))
        await driver.drain()
        assert all(chunk.sampling_mask is None for chunk in driver.chunks["b"])
        rows, output = driver.masks("a"), driver.output("a")
        with torch.no_grad():
            logits = reference(torch.tensor([[4, 5, 6, *output]])).logits[0, 2:-1] / 0.9
        for number, (token, kept) in enumerate(zip(output, rows, strict=True)):
            assert token in kept
            assert 0 < len(kept) < VOCAB
            share = torch.softmax(logits[number], dim=-1)[torch.tensor(kept)].sum()
            assert share >= 0.8 - 1e-5
            expected = logits[number, token] - torch.logsumexp(logits[number, torch.tensor(kept)], 0)
            assert abs(float(expected) - float(driver.logprobs("a")[number])) < 1e-4

    asyncio.run(main())


def test_cancelling_one_of_a_group_leaves_the_others() -> None:
    async def main() -> None:
        driver = Driver(make_engine(make_model()))
        for name in "abc":
            await driver.start(ask(name, [1, 2, 3, 4, 5, 6], max_tokens=9, temperature=0.0))
        await driver.step()
        await driver.cancel("a")
        await driver.drain()
        assert driver.finished() == ["b", "c"]
        assert driver.output("b") == driver.output("c")
        driver.check_nothing_is_held()

    asyncio.run(main())


def test_requests_wait_until_the_loop_runs_and_the_loop_waits_for_requests() -> None:
    async def main() -> None:
        async with serve() as engine:
            first = await collect(engine.generate(ask("a", max_tokens=3)))
            for _ in range(5):
                await asyncio.sleep(0)
            steps = (await engine.report()).counters["steps"]
            second = await collect(engine.generate(ask("a", max_tokens=3)))
            assert len(joined(first)) == len(joined(second)) == 3
            assert (await engine.report()).counters["steps"] == steps + 3

    asyncio.run(main())


def test_its_loop_says_how_far_it_is_while_it_has_work() -> None:
    async def main() -> None:
        async with serve() as engine:
            assert engine.progress() is None
            seen = []
            async for _ in engine.generate(ask("a", max_tokens=3, chunk_tokens=1)):
                seen.append(engine.progress())
            assert [one for one in seen if one is not None] == [1, 2]
            await asyncio.sleep(0)
            assert engine.progress() is None
            assert (await engine.report()).counters["busy_s"] > 0

    asyncio.run(main())


def test_a_seed_of_the_engine_makes_unseeded_requests_repeatable() -> None:
    async def once(seed: int) -> list[int]:
        driver = Driver(make_engine(make_model(), seed=seed))
        await driver.start(ask("a", max_tokens=12))
        await driver.drain()
        return driver.output("a")

    assert asyncio.run(once(1)) == asyncio.run(once(1))
    assert asyncio.run(once(1)) != asyncio.run(once(2))


def test_policies_of_one_engine_have_their_own_labels_and_share_no_cache() -> None:
    async def main() -> None:
        driver = Driver(make_engine(make_model(), versions={"policy": 3, "other": 8}))
        for name, policy in (("a", "policy"), ("b", "other")):
            await driver.start(ask(name, [4, 5, 6, 7, 8, 9], max_tokens=2, seed=1, policy=policy))
        await driver.drain()
        report = await driver.engine.report()
        assert report.versions == {"policy": 3, "other": 8}
        assert report.counters["cached_tokens"] == 0
        assert driver.versions("a") == [3, 3]
        assert driver.versions("b") == [8, 8]
        with pytest.raises(
            PenstockError, match="serves 'other' with the same full weights, got new ones for 'policy'"
        ):
            await driver.engine.update(update_to(9))
        with pytest.raises(RequestRefused, match="serves policy 'policy' and 'other', got 'third'"):
            await collect(driver.engine.generate(ask("c", policy="third")))

    asyncio.run(main())


def test_the_report_says_what_the_engine_can_do() -> None:
    async def main() -> None:
        plain = set((await make_engine(make_model()).report()).capabilities)
        assert plain == {
            "logprobs", "versions", "greedy", "seed", "truncation", "penalties", "logit_bias", "min_tokens",
            "priority", "forks", "prefix_cache", "sampling_mask", "adapters", "dora", "merged_adapters", "delta",
            "shards", "exact_resume",
            "interrupt:inflight", "interrupt:inflight_recompute", "interrupt:drain", "interrupt:abort_resume",
            "interrupt:abort_retry",
        }  # fmt: skip
        reads_text = set((await make_engine(make_model(), tokenizer=Letters()).report()).capabilities)
        assert reads_text - plain == {"stop_strings"}

    asyncio.run(main())
