import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.engines import engine_pool as pool_module
from penstock.engines.engine_pool import EnginePool
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import PenstockError
from penstock.interfaces import Engine
from penstock.types import Parent, UpdateReceipt, WeightUpdate, since_restart
from tests.engines.contract import EngineContract, ask, collect, update_to


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


def test_memory_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "REMEMBERED", 3)

    async def main() -> None:
        pool = pool_of([scripted("a")])
        for number in range(20):
            await collect(pool.generate(ask(str(number), [number + 1], max_tokens=1)))
        assert len(pool._homes) == 6

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
        updating = asyncio.create_task(pool.update(update_to(2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert diary == ["a stages", "b stages", "c stages"]
        for engine in reversed(engines):
            engine.may_go.set()
        receipt = await updating
        assert diary[3:] == ["a loads", "a serves 2", "b loads", "b serves 2", "c loads", "c serves 2"]
        assert (receipt.version, receipt.stall_s, receipt.discarded_tokens) == (2, 0.99, 6)

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


def test_requests_of_an_expelled_engine_begin_again_on_another() -> None:
    async def main() -> None:
        ticks = asyncio.Event()

        async def sleep(_: float) -> None:
            await ticks.wait()

        slow, other = Meeting("a", sleep=sleep), Meeting("b", version=1)
        pool = pool_of([slow, other])
        ticks.set()
        stream = pool.generate(ask("x", [1], max_tokens=4))
        first = await anext(stream)
        ticks.clear()
        untold = asyncio.create_task(collect(pool.generate(ask("y", [1], max_tokens=2))))
        await asyncio.sleep(0)
        for engine in (slow, other):
            engine.may_go.set()
        slow.error = PenstockError("a bucket is damaged")
        with pytest.raises(PenstockError, match="damaged"):
            await pool.update(update_to(2))
        rest = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        assert await pool.expel_failed() == {"a": 2}
        chunks = [first, *await rest]
        assert [chunk.restarts for chunk in chunks] == [False, True, False, False, False]
        assert [int(v) for chunk in since_restart(chunks) for v in chunk.versions] == [2] * 4
        assert [chunk.restarts for chunk in await untold] == [False, False]
        assert pool.names == ("b",)
        other.error = PenstockError("a bucket is damaged")
        with pytest.raises(PenstockError, match="damaged"):
            await pool.update(update_to(3))
        assert await pool.expel_failed() == {}  # the last one stays

    asyncio.run(main())
