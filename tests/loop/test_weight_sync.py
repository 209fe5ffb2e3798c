"""Weight sync in virtual time: what is sent, what is skipped, what is tried again, and who has to leave."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from penstock.engines.engine_pool import EnginePool
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import (
    BaseMissing,
    DamagedBucket,
    EngineLost,
    FingerprintMismatch,
    PenstockError,
    SnapshotReplaced,
    UpdateAbandoned,
    UserError,
)
from penstock.loop.activity import Activity
from penstock.loop.admission import StalenessGate
from penstock.loop.attempts import Attempts
from penstock.loop.rollout_buffer import RolloutBuffer
from penstock.loop.weight_sync import Offer, Retries, WeightSync, send_and_take
from penstock.observe.event_stream import EventStream
from penstock.observe.events import LogLine, UpdateEvent
from penstock.observe.readers import MemoryReader
from penstock.planner.simulation import SimulatedEngine, SimulatedTrainer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import AdapterSpec, Interrupt, UpdateReceipt, WeightUpdate
from penstock.records.interfaces import Engine
from penstock.sync.ring import SlotRing
from tests.run.test_controller_events import events_of


class Trainer(SimulatedTrainer):
    """Has a ring of slots, as a publisher has; notes what it was asked for."""

    def __init__(self, *, slots: int = 2, publish_s: float = 0.0) -> None:
        super().__init__(step_s=lambda: 0.0, publish_s=lambda: publish_s)
        self.ring = SlotRing(slots, replaces=True)
        self.published: list[tuple[int, bool]] = []
        self.released: list[tuple[int, bool]] = []

    async def snapshot(self, version: int) -> None:
        self.ring.take(version)

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        self.ring.ask_for(version)
        self.published.append((version, full))
        return await super().publish(version, full=full)

    async def release(self, version: int, *, delivered: bool = True) -> None:
        self.released.append((version, delivered))
        if not self.ring.forget_replaced(version):
            self.ring.release(version)


class World:
    def __init__(self, engine: Engine, trainer: Trainer, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        stream = EventStream(loop)
        self.memory = MemoryReader()
        stream.subscribe("memory", self.memory)
        self.gate = StalenessGate(groups_per_step=1, max_staleness=9, late="mask")
        self.trainer = trainer
        self.activity = Activity()
        self.flush = stream.flush
        self.sync = WeightSync(
            trainer=trainer,
            engines=engine if isinstance(engine, EnginePool) else EnginePool({"engine0": engine}),
            buffer=RolloutBuffer(self.gate),
            events=events_of(stream, self.gate, Attempts()),
            activity=self.activity,
            **options,
        )

    async def step(self, number: int) -> int:
        version = self.sync.issue(number)
        await self.trainer.snapshot(version)
        now = asyncio.get_running_loop().time()
        await self.sync.offer(Offer(version=version, made_s=now, snapshot_s=0.25))
        return version

    def updates(self) -> list[UpdateEvent]:
        self.flush()
        return [event for event in self.memory.events if isinstance(event, UpdateEvent)]

    def log(self) -> list[str]:
        self.flush()
        return [event.line for event in self.memory.events if isinstance(event, LogLine)]


def simulated(update_s: float = 0.0) -> SimulatedEngine:
    return SimulatedEngine(num_tokens=lambda: 1, token_s=lambda: 1.0, update_s=lambda: update_s)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scene()

    run_in_virtual_time(main())


@pytest.mark.parametrize("slots", [2, 3])
def test_the_newest_waits_and_what_it_replaces_is_never_sent(slots: int) -> None:
    async def scene() -> None:
        trainer = Trainer(slots=slots, publish_s=1.0)
        world = World(engine := simulated(update_s=9.0), trainer)
        running = asyncio.create_task(world.sync.run())
        for number in range(1, 6):  # at 0, 4, 8, 12 and 16 s: a transfer takes 10
            await asyncio.sleep(4.0 if number > 1 else 0.0)
            await world.step(number)
        assert world.activity.syncing_version == 2
        world.sync.finish()
        await running
        assert [version for version, _ in trainer.published] == [0, 2, 4]
        assert sorted(trainer.released) == [(0, True), (1, False), (2, True), (3, False), (4, True)]
        assert engine.version == 4
        assert world.gate.served_step == 5  # the step of version 4
        assert [(u.version, u.num_skipped, u.fresh_s) for u in world.updates()] == [
            (0, 1, 10.0),
            (2, 1, 12.0),
            (4, 0, 14.0),
        ]
        assert {(u.snapshot_s, u.publish_s) for u in world.updates()} == {(0.25, 1.0)}
        assert world.activity.syncing_version is None

    play(scene)


def test_a_snapshot_that_the_trainer_has_replaced_is_skipped() -> None:
    """The step that took its slot has ended, but nobody has heard of it yet."""

    async def scene() -> None:
        trainer = Trainer(publish_s=5.0)
        world = World(simulated(), trainer)
        running = asyncio.create_task(world.sync.run())
        await world.step(1)
        await asyncio.sleep(1.0)
        await world.step(2)
        newest = world.sync.issue(3)
        await trainer.snapshot(newest)  # takes the slot of version 1
        await asyncio.sleep(10.0)
        assert trainer.released == [(0, True), (1, False)]
        await world.sync.offer(Offer(version=newest, made_s=0.0))
        world.sync.finish()
        await running
        assert [version for version, _ in trainer.published] == [0, 2]
        assert world.updates()[-1].num_skipped == 1

    play(scene)


class Flaky(SimulatedEngine):
    """Fails with each of `errors`, then takes updates."""

    def __init__(self, *errors: PenstockError) -> None:
        super().__init__(num_tokens=lambda: 1, token_s=lambda: 1.0, update_s=lambda: 0.0)
        self.errors = list(errors)
        self.asked_at: list[float] = []

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        self.asked_at.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)
        return await super().update(update, interrupt)


async def deliver(world: World) -> None:
    version = world.sync.issue(0)
    await world.trainer.snapshot(version)
    await world.sync.deliver(Offer(version=version, made_s=0.0))


def test_a_failed_transfer_is_tried_again_after_longer_and_longer() -> None:
    async def scene() -> None:
        engine = Flaky(*(DamagedBucket(f"bucket {n} is damaged") for n in range(3)))
        world = World(engine, Trainer(), retries=Retries(count=3, first_s=0.5))
        await deliver(world)
        assert engine.asked_at == [0.0, 0.5, 1.5, 3.5]
        assert world.trainer.released == [(0, True)]
        assert world.log() == [
            f"version 0 did not reach every engine, trying again in {wait} s: bucket {n} is damaged"
            for n, wait in enumerate(("0.5", "1", "2"))
        ]

    play(scene)


def test_the_run_ends_when_no_engine_is_left() -> None:
    async def scene() -> None:
        engine = Flaky(*(DamagedBucket("bucket 0 is damaged") for _ in range(9)))
        world = World(engine, Trainer(), retries=Retries(count=2))
        with pytest.raises(
            PenstockError,
            match="version 0 could not be brought to the engines in 3 attempts, and no other engine is left: "
            "bucket 0 is damaged",
        ):
            await deliver(world)
        assert world.gate.served_step == 0
        assert world.trainer.released == []

    play(scene)


@pytest.mark.parametrize("error", [UserError("the disk is full"), SnapshotReplaced("gone")])
def test_what_no_retry_mends_is_not_tried_again(error: PenstockError) -> None:
    async def scene() -> None:
        engine = Flaky(error)
        world = World(engine, Trainer())
        if isinstance(error, SnapshotReplaced):
            await deliver(world)
            assert world.trainer.released == [(0, False)]
        else:
            with pytest.raises(UserError):
                await deliver(world)
        assert engine.asked_at == [0.0]

    play(scene)


DIFFERS = FingerprintMismatch("layer 3 differs; the run stops")


def test_weights_that_were_not_loaded_as_published_are_sent_again_in_full() -> None:
    async def scene() -> None:
        engine = Flaky(DIFFERS)
        world = World(engine, Trainer())
        await deliver(world)
        assert engine.asked_at == [0.0, 0.0]
        assert world.trainer.published == [(0, False), (0, True)]
        assert world.log() == [
            "version 0 is sent again in full, since an engine did not load what was published: layer 3 differs"
        ]

    play(scene)


def test_the_run_ends_with_the_mismatch_where_no_engine_is_left() -> None:
    async def scene() -> None:
        engines = {name: Flaky(*[DIFFERS] * 9) for name in ("engine0", "engine1")}
        pool = EnginePool(engines)
        world = World(pool, Trainer())
        with pytest.raises(FingerprintMismatch, match="^layer 3 differs; the run stops$"):
            await deliver(world)
        assert [len(engine.asked_at) for engine in engines.values()] == [2, 2]

    play(scene)


def test_an_engine_that_never_loads_what_was_published_leaves() -> None:
    """Another one has had a passing failure meanwhile, and stays."""

    async def scene() -> None:
        bad, good = Flaky(*[DIFFERS] * 9), Flaky(*[DamagedBucket("its disk is full")] * 2)
        pool = EnginePool({"engine0": bad, "engine1": good})
        world = World(pool, Trainer(), retries=Retries(count=1))
        await deliver(world)
        assert pool.names == ("engine1",)
        assert (len(bad.asked_at), len(good.asked_at)) == (2, 3)
        assert world.log()[-1] == (
            "engine0 leaves the run: it could not be brought to version 0 in 2 attempts (layer 3 differs); "
            "others continue with its 0 requests"
        )

    play(scene)


class AdapterTrainer(Trainer):
    """Publishes version 0 in full, and every other as an adapter on top of it."""

    async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
        update = await super().publish(version, full=full)
        if version == 0:
            return update
        return msgspec.structs.replace(
            update, selection="adapter", base=0, adapter=AdapterSpec(rank=2, alpha=4.0)
        )


class Forgetful(SimulatedEngine):
    """Has lost the weights below its adapter, until they come again."""

    def __init__(self, *, takes_base: bool = True) -> None:
        super().__init__(num_tokens=lambda: 1, token_s=lambda: 1.0, update_s=lambda: 0.0)
        self.taken: list[int] = []
        self.takes_base = takes_base

    async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
        if update.base is not None and 0 not in self.taken:
            raise BaseMissing("it has weights of no version")
        if update.base is None and not self.takes_base:
            raise DamagedBucket("its disk is full")
        self.taken.append(update.version)
        self.version = -1
        return await super().update(update, interrupt)


def adapter_world(*engines: SimulatedEngine) -> tuple[World, EnginePool]:
    pool = EnginePool({f"engine{number}": engine for number, engine in enumerate(engines)})
    world = World(pool, AdapterTrainer(), retries=Retries(count=1))
    world.sync.issue(0)  # the weights below it, which all have had
    return world, pool


def test_an_engine_that_lost_the_weights_below_its_adapter_gets_them_again() -> None:
    async def scene() -> None:
        lost, good = Forgetful(), simulated()
        world, pool = adapter_world(lost, good)
        await deliver(world)
        assert pool.names == ("engine0", "engine1")
        assert lost.taken == [0, 1]
        assert (lost.version, good.version) == (1, 1)
        assert world.trainer.published == [(1, False), (0, False), (1, True)]
        assert world.trainer.released == [(0, True), (1, True)]

    play(scene)


def test_an_adapter_that_does_not_reach_one_engine_costs_that_engine_and_without_any_the_run() -> None:
    async def scene() -> None:
        world, pool = adapter_world(Forgetful(takes_base=False), good := simulated())
        await deliver(world)
        assert (pool.names, good.version) == (("engine1",), 1)
        assert world.log()[-1].startswith("engine0 leaves the run: it could not be brought to version 1")
        world, _ = adapter_world(Forgetful(takes_base=False), Forgetful(takes_base=False))
        with pytest.raises(
            PenstockError, match="version 1 could not be brought .*, and no other engine is left"
        ):
            await deliver(world)
        world, _ = adapter_world(Flaky(*[DIFFERS] * 9), Flaky(*[DIFFERS] * 9))
        with pytest.raises(FingerprintMismatch, match="layer 3 differs"):
            await deliver(world)

    play(scene)


def test_an_engine_without_the_base_is_sent_a_full_update_at_once() -> None:
    async def scene() -> None:
        engine = Flaky(BaseMissing("it serves version 3"))
        world = World(engine, Trainer())
        await deliver(world)
        assert engine.asked_at == [0.0, 0.0]
        assert world.trainer.published == [(0, False), (0, True)]

    play(scene)


def test_engines_that_fail_for_good_leave_and_the_others_go_on() -> None:
    class Broken(ScriptedEngine):
        async def stage(self, update: WeightUpdate) -> None:
            raise DamagedBucket("its disk is full")

        async def update(self, update: WeightUpdate, interrupt: Interrupt = "inflight") -> UpdateReceipt:
            await self.stage(update)
            return await super().update(update, interrupt)

    async def scene() -> None:
        engines: list[ScriptedEngine] = [
            Broken(lambda request: [1], name="engine0", version=-1),
            ScriptedEngine(lambda request: [1], name="engine1", version=-1),
        ]
        pool = EnginePool({engine.name: engine for engine in engines})
        world = World(pool, Trainer(), retries=Retries(count=1))
        await deliver(world)
        assert pool.names == ("engine1",)
        assert [engine.version for engine in engines] == [-1, 0]
        assert len(engines[1].updates) == 1  # what it has is not sent again
        assert world.log()[-1] == (
            "engine0 leaves the run: it could not be brought to version 0 in 2 attempts (its disk is full); "
            "others continue with its 0 requests"
        )
        assert world.trainer.released == [(0, True)]
        await world.step(1)
        world.sync.finish()
        await world.sync.run()
        assert engines[1].version == 1

    play(scene)


def test_a_trainer_is_freed_of_what_nobody_will_read() -> None:
    async def scene() -> None:
        world = World(simulated(update_s=99.0), Trainer())
        running = asyncio.create_task(world.sync.run())
        await world.step(1)
        await asyncio.sleep(1.0)
        await world.step(2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await world.sync.abandon()
        assert world.trainer.released == [(0, False), (1, False)]

    play(scene)


def test_a_broadcast_is_sent_while_engines_take_it() -> None:
    class Sending(Trainer):
        sent: list[int] = []  # noqa: RUF012

        async def publish(self, version: int, *, full: bool = False) -> WeightUpdate:
            return msgspec.structs.replace(await super().publish(version), sends=True)

        async def send(self, version: int) -> None:
            self.sent.append(version)

    async def scene() -> None:
        trainer = Sending()
        await deliver(World(engine := simulated(), trainer))
        assert (trainer.sent, engine.version) == ([0], 0)

    play(scene)


def test_lost_weights_are_sent_again_under_a_new_number() -> None:
    async def scene() -> None:
        trainer = Trainer()
        world = World(engine := simulated(), trainer)
        running = asyncio.create_task(world.sync.run())
        await world.step(0)
        await asyncio.sleep(1.0)
        assert engine.version == 0
        world.sync.engine_lost("engine0", EngineLost("gone"))
        await asyncio.sleep(1.0)
        assert engine.version == 1
        assert world.gate.history.step_of(1) == 0
        world.sync.issue(1)  # a step is under way: its weights will do
        world.sync.engine_lost("engine0", EngineLost("gone"))
        await asyncio.sleep(1.0)
        assert engine.version == 1
        world.sync.finish()
        await running

    play(scene)


RECEIPT = UpdateReceipt(policy="policy", version=3, stall_s=0.0, verify_s=0.0)


class Side:
    """Ends when it is told to, with a result or an error, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.end: asyncio.Future[UpdateReceipt | None] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False

    async def act(self):
        try:
            return await self.end
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def begin():
    send, take = Side(), Side()
    both = asyncio.ensure_future(send_and_take(send.act(), take.act()))
    await asyncio.sleep(0)
    return send, take, both


def test_both_sides_end_it() -> None:
    async def main() -> None:
        send, take, both = await begin()
        send.end.set_result(None)
        await asyncio.sleep(0)
        assert not both.done()
        take.end.set_result(RECEIPT)
        assert await both is RECEIPT

    asyncio.run(main())


def test_engines_that_fail_cancel_the_sender() -> None:
    async def main() -> None:
        send, take, both = await begin()
        take.end.set_exception(PenstockError("engine1 is gone"))
        with pytest.raises(PenstockError, match="engine1 is gone"):
            await both
        assert send.was_cancelled

    asyncio.run(main())


def test_the_error_of_who_failed_first_leaves() -> None:
    async def main() -> None:
        send, take, both = await begin()
        send.end.set_exception(PenstockError("connection closed"))
        take.end.set_exception(UpdateAbandoned("the sender failed"))
        with pytest.raises(PenstockError, match="connection closed"):
            await both

    asyncio.run(main())


def test_cancelling_it_cancels_both() -> None:
    async def main() -> None:
        send, take, both = await begin()
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        assert send.was_cancelled and take.was_cancelled

    asyncio.run(main())
