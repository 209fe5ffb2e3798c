import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.engines import engine_choice
from penstock.engines.engine_pool import EnginePool
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import BaseMissing, ChannelClosed, EngineLost, FingerprintMismatch, PenstockError
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import (
    Chunk,
    GenerateRequest,
    Interrupt,
    Parent,
    Payload,
    UpdateReceipt,
    WeightUpdate,
    since_restart,
)
from penstock.records.interfaces import Engine
from tests.engines.contract import EngineContract, ask, collect, joined, update_to


class TestContract(EngineContract):
    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        yield pool_of([scripted("a"), scripted("b")])


def scripted(name: str, **options: int) -> ScriptedEngine:
    return ScriptedEngine(lambda request: range(100), name=name, max_context=64, **options)


def pool_of(engines: list[ScriptedEngine]) -> EnginePool:
    return EnginePool({engine.name: engine for engine in engines})


async def homes(pool: EnginePool, engines: list[ScriptedEngine], *requests: object) -> list[str]:
    """Which engine each request lands on when all are in flight at once."""
    streams = [pool.generate(request) for request in requests]  # type: ignore[arg-type]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    where = {request.id: engine.name for engine in engines for request in engine.requests}
    return [where[request.id] for request in requests]  # type: ignore[attr-defined]


def test_requests_spread_over_the_least_loaded() -> None:
    engines = [scripted("a"), scripted("b"), scripted("c")]
    result = asyncio.run(homes(pool_of(engines), engines, *(ask(str(n), [n + 1]) for n in range(6))))
    assert sorted(result) == ["a", "a", "b", "b", "c", "c"]


def test_a_group_stays_on_one_engine() -> None:
    engines = [scripted("a"), scripted("b")]
    group = [ask(f"g{n}", [7, 8]) for n in range(4)]
    other = [ask(f"o{n}", [9]) for n in range(3)]
    result = asyncio.run(homes(pool_of(engines), engines, *group, *other))
    assert result == ["a"] * 4 + ["b"] * 3


def test_forks_go_where_their_parent_is() -> None:
    engines = [scripted("a"), scripted("b")]
    fork = ask("f", [2, 0, 1], parent=Parent(id="p", keep=2))
    requests = [ask("x", [1]), ask("p", [2]), ask("y", [3]), ask("z", [4]), fork]
    result = asyncio.run(homes(pool_of(engines), engines, *requests))
    assert result[4] == result[1] == "b"


def test_an_idle_engine_takes_a_prompt_it_knows_unless_another_would_wait() -> None:
    async def main() -> None:
        engines = [scripted("a"), scripted("b")]
        pool = pool_of(engines)
        async with aclosing(pool.generate(ask("busy", [1]))) as busy:  # type: ignore[type-var]
            await anext(busy)
            await collect(pool.generate(ask("first", [2], max_tokens=2)))
        await collect(pool.generate(ask("again", [2], max_tokens=2)))
        assert [request.id for request in engines[1].requests] == ["first", "again"]

    asyncio.run(main())


def test_a_prompt_that_comes_again_goes_to_whoever_has_least_to_do() -> None:
    """In its second epoch a run would have all groups on the engines that they happened to be on in the first."""

    async def main() -> None:
        engines = [scripted("a"), scripted("b")]
        pool = pool_of(engines)
        prompts = [[number] for number in range(1, 9)]
        first = await homes(pool, engines, *(ask(f"x{p[0]}", p) for p in prompts))
        assert first == ["a", "b"] * 4
        of_a = [prompt for prompt, home in zip(prompts, first, strict=True) if home == "a"]
        again = await homes(pool, engines, *(ask(f"y{p[0]}", p) for p in of_a))
        assert sorted(again) == ["a", "a", "b", "b"]
        assert not pool._choice._at_work

    asyncio.run(main())


def test_memory_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "REMEMBERED", 3)

    async def main() -> None:
        pool = pool_of([scripted("a")])
        for number in range(20):
            await collect(pool.generate(ask(str(number), [number + 1], max_tokens=1)))
        assert len(pool._choice._homes) == 6

    asyncio.run(main())


def test_an_update_reaches_all_and_the_report_tells_of_the_slowest() -> None:
    async def main() -> None:
        engines = [scripted("a"), scripted("b", version=4)]
        pool = pool_of(engines)
        assert (await pool.report()).versions == {"policy": 0}
        with pytest.raises(PenstockError, match="b serves version 4, got an update to 3"):
            await pool.update(update_to(3))
        assert [engine.version for engine in engines] == [3, 4]
        receipt = await pool.update(update_to(5))
        assert receipt.version == 5
        report = await pool.report()
        assert (report.name, report.versions) == ("pool", {"policy": 5})

    asyncio.run(main())


def test_counters_add_up() -> None:
    async def main() -> None:
        pool = pool_of([scripted("a"), scripted("b")])
        await asyncio.gather(*(collect(pool.generate(ask(str(n), [n + 1], max_tokens=3))) for n in range(4)))
        counters = (await pool.report()).counters
        assert counters["tokens"] == 12
        assert counters["requests"] == 4

    asyncio.run(main())


def test_an_empty_pool_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one engine, got none"):
        EnginePool({})


def test_a_newcomer_has_the_current_weights_before_its_first_token() -> None:
    async def main() -> None:
        first, second = scripted("a"), scripted("b")
        pool = pool_of([first])
        await pool.update(update_to(3))
        await pool.join("b", second, update_to(3))
        assert pool.names == ("a", "b")
        assert (await pool.report()).versions == {"policy": 3}
        assert await homes(pool, [first, second], ask("x", [1]), ask("y", [2])) == ["a", "b"]
        with pytest.raises(ValueError, match="has an engine 'b' already"):
            await pool.join("b", scripted("b"))

    asyncio.run(main())


def test_one_that_joins_during_an_update_misses_none() -> None:
    async def main() -> None:
        taken = asyncio.Event()

        class Slow(ScriptedEngine):
            async def update(self, update: WeightUpdate, *options: Any) -> UpdateReceipt:
                await taken.wait()
                return await super().update(update, *options)

        slow = Slow(lambda request: range(9), name="a")
        pool, late = pool_of([slow]), scripted("b")
        updating = asyncio.create_task(pool.update(update_to(1)))
        await asyncio.sleep(0)
        joining = asyncio.create_task(pool.join("b", late, update_to(1)))
        await asyncio.sleep(0)
        assert pool.names == ("a",)
        taken.set()
        await asyncio.gather(updating, joining)
        await pool.update(update_to(2))
        assert (slow.version, late.version) == (2, 2)

    asyncio.run(main())


def test_one_that_left_gets_nothing_more() -> None:
    async def main() -> None:
        engines = [scripted("a"), scripted("b")]
        pool = pool_of(engines)
        assert await homes(pool, engines, ask("x", [1]), ask("y", [2])) == ["a", "b"]
        assert pool.leave("b") is engines[1]
        fork = ask("f", [2, 0, 1], parent=Parent(id="y", keep=2))
        assert await homes(pool, engines, ask("z", [2]), fork) == ["a", "a"]
        await pool.update(update_to(1))
        assert (engines[0].version, engines[1].version) == (1, 0)
        pool.leave("a")
        with pytest.raises(PenstockError, match="the pool has no engine left"):
            await collect(pool.generate(ask("w", [1])))

    asyncio.run(main())


FETCHED = (Payload(num_bytes=4),)
"""Of an update that engines must fetch before they load it."""


class Meeting(ScriptedEngine):
    """Stages when it may, and notes in a diary what it does."""

    def __init__(self, name: str, diary: list[str] | None = None, **options: Any) -> None:
        super().__init__(lambda request: range(100), name=name, **options)
        self.may_go, self.may_load, self.loads = (asyncio.Event() for _ in range(3))
        self.staged = 0
        self.may_load.set()
        self.error: Exception | None = None
        self.seen: list[int] = []
        self.was_cancelled = False
        self.diary = [] if diary is None else diary

    async def stage(self, update: WeightUpdate) -> None:
        self.seen.append(update.receivers)
        self.diary.append(f"{self.name} stages")
        try:
            await self.may_go.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        self.staged = update.version

    async def update(self, update: WeightUpdate, interrupt: Any = "inflight") -> UpdateReceipt:
        if self.staged != update.version:
            await self.stage(update)
        self.loads.set()
        self.diary.append(f"{self.name} loads")
        await self.may_load.wait()
        receipt = await super().update(update, "inflight")
        self.diary.append(f"{self.name} serves {update.version}")
        return msgspec.structs.replace(receipt, stall_s=ord(self.name) / 100, discarded_tokens=2)


def test_engines_stage_at_once_and_load_one_after_the_other() -> None:
    async def main() -> None:
        diary: list[str] = []
        engines = [Meeting(name, diary) for name in "abc"]
        pool = pool_of(engines)
        updating = asyncio.create_task(pool.update(update_to(2, payloads=FETCHED)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert diary == ["a stages", "b stages", "c stages"]
        for engine in reversed(engines):
            engine.may_go.set()
        receipt = await updating
        assert diary[3:] == ["a loads", "a serves 2", "b loads", "b serves 2", "c loads", "c serves 2"]
        assert (receipt.version, receipt.stall_s, receipt.discarded_tokens) == (2, 0.99, 6)

    asyncio.run(main())


class Standing(ScriptedEngine):
    """Samples nothing while it loads, which takes 0.1 s."""

    def __init__(self, name: str, loading: set[str], most: list[int]) -> None:
        super().__init__(lambda request: [1], name=name)
        self._loading, self._most = loading, most

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        assert self.name not in self._loading
        async for chunk in super().generate(request):
            yield chunk

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        self._loading.add(self.name)
        self._most.append(len(self._loading))
        await asyncio.sleep(0.1)
        self._loading.remove(self.name)
        return await super().update(update, "inflight")


@pytest.mark.parametrize(
    ("count", "share", "most", "took_s"),
    [(32, 0.25, 8, 0.4), (7, 0.25, 2, 0.4), (2, 1.0, 1, 0.2), (5, 1.0, 4, 0.2), (1, 0.25, 1, 0.1)],
)
def test_a_share_of_the_engines_loads_at_once_and_the_others_answer(
    count: int, share: float, most: int, took_s: float
) -> None:
    async def main() -> None:
        loading: set[str] = set()
        counts: list[int] = []
        engines = {str(number): Standing(str(number), loading, counts) for number in range(count)}
        pool = EnginePool(engines, load_share=share)

        async def update() -> float:
            await pool.update(update_to(1), "drain")
            return asyncio.get_running_loop().time()

        updating = asyncio.create_task(update())
        asked = 0
        while count > 1 and not updating.done():
            await asyncio.sleep(0.03)
            assert joined(await collect(pool.generate(ask(f"r{asked}", [asked + 1])))) == [1]
            asked += 1
        assert await updating == pytest.approx(took_s)
        assert max(counts) == most

    run_in_virtual_time(main())


def test_engines_that_leave_do_not_count_for_the_share() -> None:
    """Two take requests, so that one may load at a time, whatever the six others do that end theirs."""

    async def main() -> None:
        counts: list[int] = []
        engines = {str(number): Standing(str(number), set(), counts) for number in range(8)}
        pool = EnginePool(engines, load_share=1.0)
        for number in range(2, 8):
            pool._members[str(number)].is_leaving = True
        await pool.update(update_to(1))
        assert asyncio.get_running_loop().time() == pytest.approx(0.8)

    run_in_virtual_time(main())


def test_what_is_read_in_place_is_loaded_without_a_word_before() -> None:
    """Each engine would answer between two forward passes, and admission waits for the slowest."""

    async def main() -> None:
        diary: list[str] = []
        engines = [Meeting(name, diary) for name in "ab"]
        for engine in engines:
            engine.staged = 2  # as if: its own update does not wait either
        assert (await pool_of(engines).update(update_to(2))).version == 2
        assert diary == ["a loads", "a serves 2", "b loads", "b serves 2"]

    asyncio.run(main())


def test_one_that_cant_stage_keeps_its_version_and_holds_nobody_up() -> None:
    async def main() -> None:
        engines = [Meeting("a"), Meeting("b")]
        pool = pool_of(engines)
        for engine in engines:
            engine.may_go.set()
        engines[0].error = PenstockError("a bucket is damaged")
        with pytest.raises(PenstockError, match="damaged"):
            await pool.update(update_to(2))
        assert [engine.version for engine in engines] == [0, 2]
        engines[0].error = None
        assert (await pool.update(update_to(2))).version == 2
        assert [len(engine.seen) for engine in engines] == [2, 1]  # b has it, and is not asked again

    asyncio.run(main())


def test_new_requests_go_to_others_while_an_engine_drains() -> None:
    async def main() -> None:
        engines = [Meeting("a"), Meeting("b")]
        pool = pool_of(engines)
        assert await homes(pool, engines, ask("x", [1])) == ["a"]
        for engine in engines:
            engine.may_go.set()
        engines[0].may_load.clear()
        updating = asyncio.create_task(pool.update(update_to(1), "drain"))
        await engines[0].loads.wait()
        fork = ask("f", [1, 0], parent=Parent(id="x", keep=2))
        assert await homes(pool, engines, ask("y", [1]), fork) == ["b", "b"]
        engines[0].may_load.set()
        await updating
        assert await homes(pool, engines, ask("z", [5])) == ["a"]

    asyncio.run(main())


def test_one_that_fails_cancels_the_others_of_a_broadcast_and_the_rest_can_try_again() -> None:
    async def main() -> None:
        engines = [Meeting("a"), Meeting("b"), Meeting("c")]
        pool = pool_of(engines)
        update = update_to(2, sends=True)
        engines[0].may_go.set()
        engines[1].may_go.set()
        engines[1].error = PenstockError("b died")
        with pytest.raises(PenstockError, match="b died"):
            await pool.update(update)
        assert [engine.version for engine in engines] == [0, 0, 0]
        assert engines[2].was_cancelled
        assert await pool.expel_failed() == {"b": 0}
        engines[2].may_go.set()
        assert (await pool.update(update)).version == 2
        assert [engine.seen for engine in engines] == [[3, 2], [3], [3, 2]]
        assert [engine.version for engine in engines] == [2, 0, 2]

    asyncio.run(main())


async def expelled_midway(
    request: GenerateRequest, *, resumes: bool = True
) -> tuple[list[Chunk], EnginePool]:
    """The chunks of a request whose engine is expelled after its first chunk; versions tell the engines apart."""
    ticks = asyncio.Event()

    async def sleep(_: float) -> None:
        await ticks.wait()

    slow, other = Meeting("a", sleep=sleep), Meeting("b", version=1)
    pool = EnginePool({"a": slow, "b": other}, resumes=resumes)
    ticks.set()
    stream = pool.generate(request)
    first = await anext(stream)
    ticks.clear()
    for engine in (slow, other):
        engine.may_go.set()
    slow.error = PenstockError("a bucket is damaged")
    with pytest.raises(PenstockError, match="damaged"):
        await pool.update(update_to(2))
    rest = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    assert await pool.expel_failed() == {"a": 1}
    return [first, *await rest], pool


def test_another_engine_goes_on_with_the_requests_of_an_expelled_one() -> None:
    chunks, pool = asyncio.run(expelled_midway(ask("x", [1], max_tokens=4)))
    assert joined(chunks) == [0, 1, 2, 3]
    assert [int(v) for chunk in chunks for v in chunk.versions] == [0, 2, 2, 2]
    assert [chunk.restarts for chunk in chunks] == [False] * 4
    assert pool.names == ("b",)


def test_where_an_answer_has_one_version_it_begins_again() -> None:
    chunks, _ = asyncio.run(expelled_midway(ask("x", [1], max_tokens=4), resumes=False))
    assert [chunk.restarts for chunk in chunks] == [False, True, False, False, False]
    assert [int(v) for chunk in since_restart(chunks) for v in chunk.versions] == [2] * 4


def test_an_answer_whose_masks_are_lost_with_the_engine_begins_again() -> None:
    request = ask("x", [1], max_tokens=4, top_k=2, record_sampling_mask=True)
    chunks, _ = asyncio.run(expelled_midway(request))
    assert [int(v) for chunk in since_restart(chunks) for v in chunk.versions] == [2] * 4


def test_the_last_engine_is_not_expelled() -> None:
    async def main() -> None:
        engine = Meeting("a")
        pool = pool_of([engine])
        engine.may_go.set()
        engine.error = PenstockError("a bucket is damaged")
        with pytest.raises(PenstockError, match="damaged"):
            await pool.update(update_to(3))
        assert await pool.expel_failed() == {}

    asyncio.run(main())


class Fragile(ScriptedEngine):
    """Loses its server after two tokens, until the next update."""

    is_broken = True

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        number = 0
        async with aclosing(super().generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if self.is_broken and number == 2:
                    raise EngineLost(f"{self.name} lost its server")
                number += 1
                yield chunk

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        self.is_broken = False
        return await super().update(update, interrupt)


def fragile(name: str) -> Fragile:
    return Fragile(lambda request: range(4), name=name)


def test_another_engine_goes_on_with_the_requests_of_a_lost_one() -> None:
    async def main() -> None:
        broken, well = fragile("a"), scripted("b")
        pool = pool_of([broken, well])
        told: list[str] = []
        pool.on_lost = lambda name, error: told.append(f"{name}: {error}")
        chunks = await collect(pool.generate(ask("x", max_tokens=4)))
        assert joined(chunks) == [0, 1, 2, 3]
        assert not any(chunk.restarts for chunk in chunks)
        assert told == ["a: a lost its server"]
        await collect(pool.generate(ask("y", max_tokens=4)))
        assert [request.id for request in broken.requests] == ["x"]
        await pool.update(update_to(1))
        assert len(joined(await collect(pool.generate(ask("z", prompt=[9], max_tokens=4))))) == 4
        assert [request.id for request in broken.requests] == ["x", "z"]

    asyncio.run(main())


def test_without_another_engine_requests_wait_for_the_lost_one() -> None:
    async def main() -> None:
        pool = pool_of([fragile("a")])
        lost = asyncio.Event()
        pool.on_lost = lambda name, error: lost.set()
        answering = asyncio.create_task(collect(pool.generate(ask("x", max_tokens=4))))
        await lost.wait()
        await asyncio.sleep(0)
        assert not answering.done()
        await pool.update(update_to(1))
        chunks = await answering
        assert joined(chunks) == [0, 1, 2, 3]
        assert [int(version) for chunk in chunks for version in chunk.versions] == [0, 0, 1, 1]

    asyncio.run(main())


def test_a_lost_engine_that_nobody_brings_back_is_an_error() -> None:
    async def main() -> None:
        with pytest.raises(EngineLost, match="a lost its server"):
            await collect(pool_of([fragile("a")]).generate(ask("x", max_tokens=4)))

    asyncio.run(main())


class Baseless(ScriptedEngine):
    """Lacks the weights below its adapter, until full ones come."""

    has_base = False

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        self.has_base = self.has_base or update.base is None
        if not self.has_base:
            raise BaseMissing("it has weights of no version")
        return UpdateReceipt(policy=update.policy, version=update.version, stall_s=0.0, verify_s=0.0)


def test_an_engine_is_brought_what_lies_below_its_adapter_and_takes_no_request_before_the_adapter() -> None:
    async def main() -> None:
        lacking, well = (Baseless(lambda request: range(4), name=name) for name in "ab")
        well.has_base = True
        pool = pool_of([lacking, well])
        adapter = msgspec.structs.replace(update_to(5), selection="adapter", base=1)
        with pytest.raises(BaseMissing):
            await pool.update(adapter)
        brought: list[Engine] = []

        async def bring(engine: Engine) -> None:
            brought.append(engine)
            await engine.update(update_to(1))

        await pool.mend(bring)
        assert brought == [lacking]
        assert await homes(pool, [lacking, well], ask("x"), ask("y")) == ["b", "b"]
        await pool.update(adapter)
        again = await homes(pool, [lacking, well], ask("z", prompt=[8]), ask("w", prompt=[9]))
        assert sorted(again) == ["a", "b"]

    asyncio.run(main())


def test_engines_leave_that_failed_in_one_way_alone() -> None:
    class Failing(ScriptedEngine):
        async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
            raise FingerprintMismatch("x differs") if self.name == "a" else PenstockError("no way")

    async def main() -> None:
        pool = pool_of([Failing(lambda request: [1], name=name) for name in "ab"])
        with pytest.raises(FingerprintMismatch):
            await pool.update(update_to(1))
        assert await pool.expel_failed(FingerprintMismatch) == {"a": 0}
        assert pool.names == ("b",)
        assert await pool.expel_failed(FingerprintMismatch) == {}
        assert await pool.expel_failed() == {}  # it would be all

    asyncio.run(main())


class Mortal(ScriptedEngine):
    """Its process can end: then nothing answers any more."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda request: range(100), name=name, max_context=64)
        self.dead = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            self._must_live()
            yield chunk
            await asyncio.sleep(0)
        self._must_live()

    async def update(self, *arguments: Any) -> UpdateReceipt:
        self._must_live()
        return await super().update(*arguments)

    async def stage(self, update: WeightUpdate) -> None:
        self._must_live()
        await super().stage(update)

    def _must_live(self) -> None:
        if self.dead.is_set():
            raise ChannelClosed(f"{self.name} is gone")


def mortal_pool(*engines: Mortal) -> EnginePool:
    return EnginePool({engine.name: engine for engine in engines}, replaces=True)


def test_another_engine_goes_on_with_the_answers_of_one_that_died() -> None:
    async def main() -> None:
        a, b = Mortal("a"), Mortal("b")
        pool = mortal_pool(a, b)
        stream = pool.generate(ask("r", [7], max_tokens=6, chunk_tokens=1))
        first = await anext(stream)
        a.dead.set()
        rest = await collect(stream)
        assert joined([first, *rest]) == list(range(6))
        assert [request.num_resumed for request in b.requests] == [1]
        assert pool.names == ("b",)
        assert pool.expects("a")

    asyncio.run(main())


def test_where_the_last_engine_died_requests_and_updates_wait_for_the_one_that_joins() -> None:
    async def main() -> None:
        a, successor = Mortal("a"), Mortal("a")
        pool = mortal_pool(a)
        a.dead.set()
        updating = asyncio.create_task(pool.update(update_to(1)))
        asking = asyncio.create_task(collect(pool.generate(ask("r", [7], max_tokens=3, chunk_tokens=1))))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not updating.done()
        assert pool.names == ()
        pool.enlist("a", successor)
        receipt = await updating
        assert receipt.version == successor.version == 1
        chunks = await asking
        assert joined(chunks) == [0, 1, 2]
        assert {int(version) for chunk in chunks for version in chunk.versions} == {1}

    asyncio.run(main())


def test_an_engine_that_is_enlisted_gets_no_request_before_it_has_taken_an_update() -> None:
    async def main() -> None:
        a, b = Mortal("a"), Mortal("b")
        pool = mortal_pool(a)
        await pool.update(update_to(1))
        pool.enlist("b", b)
        waiting = asyncio.create_task(pool.wait_serving("b"))
        for number in range(4):
            await collect(pool.generate(ask(str(number), [number + 1], max_tokens=1)))
        assert (len(a.requests), len(b.requests), waiting.done()) == (4, 0, False)
        await pool.update(update_to(2))
        await waiting
        async with aclosing(pool.generate(ask("busy", [8]))) as busy:  # type: ignore[type-var]
            await anext(busy)
            await collect(pool.generate(ask("next", [9], max_tokens=1)))
        assert len(b.requests) == 1

    asyncio.run(main())


def test_an_update_goes_on_without_an_engine_that_died() -> None:
    async def main() -> None:
        a, b = Mortal("a"), Mortal("b")
        pool = mortal_pool(a, b)
        a.dead.set()
        assert (await pool.update(update_to(1))).version == b.version == 1
        assert pool.names == ("b",)
        assert [report.name for report in await pool.reports()] == ["b"]

    asyncio.run(main())


def test_what_a_process_that_was_replaced_still_says_costs_its_successor_nothing() -> None:
    async def main() -> None:
        a, successor = Mortal("a"), Mortal("a")
        pool = mortal_pool(a)
        stream = pool.generate(ask("r", [7], max_tokens=4, chunk_tokens=1))
        first = await anext(stream)
        pool.lose("a")
        pool.enlist("a", successor)
        await pool.update(update_to(1))
        a.dead.set()
        rest = await collect(stream)
        assert joined([first, *rest]) == [0, 1, 2, 3]
        assert pool.names == ("a",)
        assert len(successor.requests) == 1

    asyncio.run(main())


def test_without_a_promise_of_another_engine_a_death_is_an_error() -> None:
    async def main() -> None:
        a = Mortal("a")
        pool = pool_of([a])
        a.dead.set()
        with pytest.raises(ChannelClosed, match="a is gone"):
            await collect(pool.generate(ask("r", [7])))

    asyncio.run(main())


def test_an_engine_that_leaves_ends_its_answers_and_gets_no_new_ones() -> None:
    async def main() -> None:
        engines = [scripted("a"), scripted("b")]
        pool = pool_of(engines)
        stream = pool.generate(ask("r", [1], max_tokens=3))
        await anext(stream)
        leaving = asyncio.create_task(pool.retire("a", drain_s=30))
        await asyncio.sleep(0)
        assert await homes(pool, engines, ask("s", [1]), ask("t", [2])) == ["b", "b"]
        assert pool.names == ("a", "b")
        assert len([chunk async for chunk in stream]) == 2
        assert await leaving == 0
        assert pool.names == ("b",)

    asyncio.run(main())


def test_what_an_engine_has_not_ended_goes_on_elsewhere() -> None:
    async def main() -> None:
        engines = [scripted("a"), scripted("b")]
        pool = pool_of(engines)
        stream = pool.generate(ask("r", [1], max_tokens=4))
        first = await anext(stream)
        assert await pool.retire("a", drain_s=0) == 1
        chunks = [first, *[chunk async for chunk in stream]]
        assert sum(len(chunk.token_ids) for chunk in since_restart(chunks)) == 4
        assert [request.id for request in engines[1].requests] == ["r"]

    asyncio.run(main())


def test_the_only_engine_cannot_leave() -> None:
    with pytest.raises(ValueError, match="a is the only engine that takes requests"):
        asyncio.run(pool_of([scripted("a")]).retire("a", drain_s=0))
