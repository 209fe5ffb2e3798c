"""What every engine must do. A test module subclasses `EngineContract` and says how to open one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, TypeVar, get_args

import numpy as np
import pytest

from penstock.errors import PenstockError, RequestRefused
from penstock.records import Chunk, GenerateRequest, Interrupt, SamplingParams, WeightUpdate
from penstock.records.interfaces import Engine

AnyEngine = TypeVar("AnyEngine", bound=Any)


def ask(request_id: str, prompt: list[int] | None = None, **options: Any) -> GenerateRequest:
    """A request; options of `SamplingParams` and of `GenerateRequest` may be mixed."""
    names = GenerateRequest.__struct_fields__
    own = {key: options.pop(key) for key in list(options) if key in names}
    return GenerateRequest(
        id=request_id,
        token_ids=np.array([1, 2, 3] if prompt is None else prompt, dtype=np.int32),
        sampling=SamplingParams(**options),
        **own,
    )


def update_to(version: int, **options: Any) -> WeightUpdate:
    return WeightUpdate(version=version, transport="none", tensors=(), buckets=(), fingerprint={}, **options)


def interrupt_of(rebuilds: bool) -> Interrupt:
    """Whether KV is computed again."""
    return "inflight_recompute" if rebuilds else "inflight"


async def collect(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def joined(chunks: list[Chunk]) -> list[int]:
    return [int(token) for chunk in chunks for token in chunk.token_ids]


def play(scene: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 100.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(timeout_s):
            await scene()

    asyncio.run(main())


@asynccontextmanager
async def running(engine: AnyEngine) -> AsyncIterator[AnyEngine]:
    """An engine that runs while the block does."""
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            await engine.close()


class EngineContract:
    """Subclasses give `open_engine()`: an async context manager of a served engine whose context holds
    at most `context` tokens, at version 0, and whose answers are at least `long` tokens long when they may be."""

    context = 64
    long = 40
    """Tokens of answers that must not end before they are interrupted."""
    updates: tuple[int, ...] = (3,)
    """Versions that an answer is interrupted with; the next one where the answer was quicker."""

    def open_engine(self) -> AbstractAsyncContextManager[Engine]:
        raise NotImplementedError

    def play(self, scene: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), self.open_engine() as engine:
                await scene(engine)

        asyncio.run(main())

    def test_gives_max_tokens_and_then_says_why_it_ended(self) -> None:
        async def scene(engine: Engine) -> None:
            chunks = await collect(engine.generate(ask("a", max_tokens=8)))
            assert len(joined(chunks)) == 8
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]

        self.play(scene)

    def test_coalesces_chunks(self) -> None:
        async def scene(engine: Engine) -> None:
            chunks = await collect(engine.generate(ask("a", max_tokens=8, chunk_tokens=3)))
            assert [len(chunk.token_ids) for chunk in chunks] == [3, 3, 2]

        self.play(scene)

    def test_labels_tokens_with_the_served_version(self) -> None:
        async def label(engine: Engine, version: int) -> list[int]:
            async with aclosing(engine.generate(ask("a", max_tokens=self.long))) as chunks:
                versions = [int(v) for v in (await anext(chunks)).versions]
                receipt = await engine.update(update_to(version))
                assert receipt.version == version
                assert (await engine.report()).versions == {"policy": version}
                async for chunk in chunks:
                    versions += [int(v) for v in chunk.versions]
            assert len(versions) == self.long
            assert versions == sorted(versions)
            return versions

        async def scene(engine: Engine) -> None:
            served = 0
            for version in self.updates:
                versions = await label(engine, version)
                assert versions[0] == served
                served = version
                if versions[-1] == version:
                    return
            raise AssertionError(f"every answer ended before the update: {versions[-1]}")

        self.play(scene)

    def test_what_was_staged_is_served_once_it_is_loaded(self) -> None:
        async def scene(engine: Engine) -> None:
            await engine.stage(update_to(3))
            assert (await engine.report()).versions == {"policy": 0}
            await engine.stage(update_to(4))  # in its place
            assert (await engine.update(update_to(4))).version == 4
            await engine.stage(update_to(5))
            assert (await engine.update(update_to(6))).version == 6

        self.play(scene)

    def test_refuses_a_version_that_is_not_newer(self) -> None:
        async def scene(engine: Engine) -> None:
            await engine.update(update_to(2))
            with pytest.raises(PenstockError, match="version 2"):
                await engine.update(update_to(2))

        self.play(scene)

    def test_takes_a_part_only_on_top_of_its_base(self) -> None:
        async def scene(engine: Engine) -> None:
            await engine.update(update_to(2))
            with pytest.raises(
                PenstockError, match="serves version 2, .* changed since version 1; send it a full"
            ):
                await engine.update(update_to(3, base=1, selection="delta"))
            assert (await engine.report()).versions == {"policy": 2}
            if "delta" in (await engine.report()).capabilities:
                assert (await engine.update(update_to(3, base=2, selection="delta"))).version == 3
            else:
                with pytest.raises(PenstockError, match="takes whole weights"):
                    await engine.update(update_to(3, base=2, selection="delta"))

        self.play(scene)

    def test_updates_are_taken_in_the_order_of_the_calls(self) -> None:
        async def scene(engine: Engine) -> None:
            receipts = await asyncio.gather(*(engine.update(update_to(version)) for version in (1, 2, 5)))
            assert [receipt.version for receipt in receipts] == [1, 2, 5]
            assert (await engine.report()).versions == {"policy": 5}

        self.play(scene)

    def test_refuses_an_interrupt_that_it_does_not_name(self) -> None:
        async def scene(engine: Engine) -> None:
            named = (await engine.report()).capabilities
            for version, interrupt in enumerate(get_args(Interrupt), start=1):
                if f"interrupt:{interrupt}" in named:
                    assert (await engine.update(update_to(version), interrupt)).version == version
                else:
                    with pytest.raises(
                        PenstockError, match=f"can't update with interrupt '{interrupt}'; set"
                    ):
                        await engine.update(update_to(version), interrupt)

        self.play(scene)

    def test_refuses_a_prompt_that_fills_the_context(self) -> None:
        async def scene(engine: Engine) -> None:
            with pytest.raises(RequestRefused, match="'a' was refused"):
                await collect(engine.generate(ask("a", prompt=[1] * self.context)))
            with pytest.raises(RequestRefused, match="'b' was refused"):
                await collect(engine.generate(ask("b", prompt=[])))

        self.play(scene)

    def test_refuses_another_policy(self) -> None:
        async def scene(engine: Engine) -> None:
            with pytest.raises(RequestRefused, match="serves policy 'policy'"):
                await collect(engine.generate(ask("a", policy="teacher")))
            with pytest.raises(PenstockError, match="policy"):
                await engine.update(update_to(1, policy="teacher"))

        self.play(scene)

    def test_ends_at_the_context_limit(self) -> None:
        async def scene(engine: Engine) -> None:
            chunks = await collect(engine.generate(ask("a", prompt=[5] * (self.context - 4), max_tokens=50)))
            assert len(joined(chunks)) == 4
            assert chunks[-1].finish_reason == "length"

        self.play(scene)

    def test_goes_on_after_output_that_was_sampled_before(self) -> None:
        """As if it had sampled all of it: the same tokens, and the same end."""

        async def scene(engine: Engine) -> None:
            whole = joined(await collect(engine.generate(ask("a", max_tokens=8, seed=3))))
            again = ask("b", [1, 2, 3, *whole[:5]], max_tokens=8, seed=3, num_resumed=5)
            chunks = await collect(engine.generate(again))
            if "exact_resume" in (await engine.report()).capabilities:
                assert joined(chunks) == whole[5:]
            assert len(joined(chunks)) == 3
            assert chunks[-1].finish_reason == "length"
            assert [int(version) for chunk in chunks for version in chunk.versions] == [0] * 3
            assert all(chunk.logprobs.size == chunk.token_ids.size for chunk in chunks)

        self.play(scene)

    def test_closing_the_iterator_cancels(self) -> None:
        async def scene(engine: Engine) -> None:
            async with aclosing(engine.generate(ask("a", max_tokens=self.long))) as chunks:
                await anext(chunks)
                assert (await engine.report()).num_running == 1
            report = await engine.report()
            assert (report.num_running, report.num_waiting) == (0, 0)
            assert len(joined(await collect(engine.generate(ask("a", max_tokens=8))))) == 8

        self.play(scene)

    def test_serves_many_at_once_and_counts_them(self) -> None:
        async def scene(engine: Engine) -> None:
            results = await asyncio.gather(
                *(collect(engine.generate(ask(str(n), prompt=[n + 1], max_tokens=n + 1))) for n in range(7))
            )
            assert [len(joined(chunks)) for chunks in results] == [1, 2, 3, 4, 5, 6, 7]
            counters = (await engine.report()).counters
            assert counters["requests"] == 7
            assert counters["tokens"] == 28
            assert counters["busy_s"] >= 0
            assert counters["steps"] >= 7

        self.play(scene)

    def test_close_wakes_waiters_and_may_be_repeated(self) -> None:
        async def scene(engine: Engine) -> None:
            async with aclosing(engine.generate(ask("a", max_tokens=self.long))) as chunks:
                await anext(chunks)
                await engine.close()
                await engine.close()
                rest = [chunk async for chunk in chunks]
            assert rest[-1].finish_reason == "cancelled"
            with pytest.raises(PenstockError, match="closed"):
                await collect(engine.generate(ask("b")))

        self.play(scene)
