"""Updates in two phases: the engine generates while one is staged, and nothing has happened before it is loaded."""

import asyncio
import copy
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engines.engine_pool import EnginePool
from penstock.errors import BaseMissing, DamagedBucket, EngineLost, FingerprintMismatch, PenstockError
from penstock.models.published import published_tensors
from penstock.records import WeightUpdate
from penstock.records.interfaces import Staged, Verification
from penstock.sync.in_process import Exchange, InProcessPublisher, InProcessStagingReceiver
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import AnyReceiver, Rendezvous, make_publisher
from tests.engines.contract import ask
from tests.engines.embedded.tiny import Driver, make_engine, make_model


class Held(InProcessStagingReceiver):
    """Stages when it is told to, and keeps a diary."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self.entered, self.may_go, self.dropped = (threading.Event() for _ in range(3))
        self.may_go.set()
        self.diary: list[str] = []

    def stage(self, update: WeightUpdate) -> Staged:
        self.entered.set()
        assert self.may_go.wait(timeout=30)
        self.diary.append(f"stage {update.version}")
        assert threading.current_thread() is not threading.main_thread()
        return super().stage(update)

    def load(self, staged: Staged, tensors: Mapping[str, Any]) -> Verification:
        self.diary.append(f"load {staged.update.version}")
        assert threading.current_thread() is threading.main_thread()
        return super().load(staged, tensors)

    def drop(self, staged: Staged) -> None:
        self.diary.append(f"drop {staged.update.version}")
        super().drop(staged)
        self.dropped.set()


class World:
    """A trainer's model and an engine with other weights, in one process."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.trained = model if model is not None else make_model(seed=1)
        exchange: Exchange = {}
        self.exchange = exchange
        self.receiver = Held(exchange)
        self.publisher = InProcessPublisher(
            published_tensors(self.trained), exchange=exchange, transport="in_process_staged"
        )
        served = copy.deepcopy(self.trained)
        with torch.no_grad():
            for tensor in published_tensors(served).values():
                tensor.mul_(0.5)
        self.served = published_tensors(served)
        self.engine = make_engine(served, receiver=self.receiver)
        self.driver = Driver(self.engine)

    def publish(self, version: int) -> WeightUpdate:
        self.publisher.snapshot(version, published_tensors(self.trained))
        return self.publisher.describe(version)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


def test_generation_goes_on_while_an_update_is_staged() -> None:
    async def main() -> None:
        world = World()
        world.receiver.may_go.clear()
        await world.driver.start(ask("a", max_tokens=9, seed=1))
        updating = asyncio.create_task(world.engine.update(world.publish(1)))
        await asyncio.sleep(0)
        await until(world.receiver.entered)
        for _ in range(4):
            await world.driver.step()
        world.receiver.may_go.set()
        receipt = await updating
        await world.driver.drain()
        assert world.driver.versions("a") == [0] * 4 + [1] * 5
        assert receipt.stage_s > 0
        assert world.receiver.diary == ["stage 1", "load 1", "drop 1"]
        assert all(torch.equal(world.served[name], t) for name, t in published_tensors(world.trained).items())

    asyncio.run(main())


def test_a_failed_stage_leaves_the_engine_serving_what_it_had() -> None:
    async def main() -> None:
        world = World()
        before = {name: tensor.clone() for name, tensor in world.served.items()}
        await world.driver.start(ask("a", max_tokens=6, seed=1))
        await world.driver.step()
        update = world.publish(1)
        world.exchange[update.buckets[0]][5] ^= 1
        with pytest.raises(DamagedBucket, match="version 1: bucket 0 arrived damaged"):
            await world.engine.update(update)
        assert all(torch.equal(world.served[name], tensor) for name, tensor in before.items())
        await world.driver.drain()
        await world.driver.start(ask("b", max_tokens=2))
        await world.driver.drain()
        assert world.driver.versions("a") + world.driver.versions("b") == [0] * 8
        world.publisher.release(1)
        assert (await world.engine.update(world.publish(2))).version == 2

    asyncio.run(main())


def test_an_update_is_staged_after_the_one_before_it_was_loaded() -> None:
    async def main() -> None:
        world = World()
        updates = [world.publish(version) for version in (1, 2)]
        await asyncio.gather(*(world.engine.update(update) for update in updates))
        assert world.receiver.diary == ["stage 1", "load 1", "drop 1", "stage 2", "load 2", "drop 2"]

    asyncio.run(main())


def test_a_stage_for_nobody_is_dropped() -> None:
    async def main() -> None:
        world = World()
        world.receiver.may_go.clear()
        updating = asyncio.create_task(world.engine.update(world.publish(1)))
        await asyncio.sleep(0)
        await until(world.receiver.entered)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        world.receiver.may_go.set()
        await until(world.receiver.dropped)
        assert world.receiver.diary == ["stage 1", "drop 1"]
        assert world.engine.versions == {"policy": 0}

    asyncio.run(main())


def test_an_engine_that_was_closed_meanwhile_loads_nothing() -> None:
    async def main() -> None:
        world = World()
        world.receiver.may_go.clear()
        updating = asyncio.create_task(world.engine.update(world.publish(1)))
        await asyncio.sleep(0)
        await until(world.receiver.entered)
        await world.engine.close()
        world.receiver.may_go.set()
        with pytest.raises(PenstockError, match="engine0 is closed"):
            await updating
        assert world.receiver.diary == ["stage 1", "drop 1"]

    asyncio.run(main())


def with_buffer(model: nn.Module) -> nn.Module:
    """Adds a persistent buffer to what its last norm gives, as a router adds a bias to its scores."""
    norm = model.model.norm
    norm.register_buffer("shift", torch.randn(32, generator=torch.Generator().manual_seed(3)))
    norm.register_forward_hook(lambda module, inputs, output: output + module.shift)
    return model


def test_a_buffer_that_training_moves_reaches_the_engine() -> None:
    async def main() -> None:
        world = World(with_buffer(make_model(seed=1)))
        for version in (1, 2):
            world.trained.model.norm.shift += 1
            await world.engine.update(world.publish(version))
            world.publisher.release(version)
            assert torch.equal(world.served["model.norm.shift"], world.trained.model.norm.shift)
        await world.driver.start(ask("a", [4, 5, 6], max_tokens=1, temperature=0.0))
        await world.driver.drain()
        with torch.no_grad():
            logits = world.trained(torch.tensor([[4, 5, 6]])).logits[0, -1]
        assert world.driver.output("a") == [int(logits.argmax())]

    asyncio.run(main())


class Changing(World):
    """Publishes what has changed, by a transport of choice, after a full update."""

    def __init__(self, transport: str) -> None:
        super().__init__()
        at = Rendezvous(exchange=self.exchange)
        published = published_tensors(self.trained)
        self.publisher = make_publisher(transport, published, Publishing(selection="delta"), at)  # type: ignore[assignment]
        receiver = AnyReceiver(at)
        self.engine = make_engine(copy.deepcopy(self.trained), receiver=receiver)
        self.served = self.engine._updates._tensors
        self.driver = Driver(self.engine)

    def train(self) -> None:
        with torch.no_grad():
            self.trained.model.norm.weight[3] += 1

    def is_served(self) -> bool:
        return all(torch.equal(self.served[name], t) for name, t in published_tensors(self.trained).items())


@pytest.mark.parametrize("transport", ["in_process", "in_process_staged"])
def test_a_delta_is_taken_between_two_passes_and_a_damaged_one_not_at_all(transport: str) -> None:
    async def main() -> None:
        world = Changing(transport)
        await world.driver.start(ask("a", max_tokens=9, seed=1))
        for version in (1, 2):
            world.train()
            await world.driver.step()
            await world.engine.update(world.publish(version))
            world.publisher.release(version)
            assert world.is_served()
        world.train()
        update = world.publish(3)
        assert update.selection == "delta"
        number = next(n for n, payload in enumerate(update.payloads) if payload.num_bytes)
        world.exchange[update.buckets[number]][-1] ^= 1
        with pytest.raises(DamagedBucket, match=f"version 3: bucket {number} arrived damaged"):
            await world.engine.update(update)
        await world.driver.drain()
        assert world.driver.versions("a") == [0, 1, *[2] * 7]
        await world.engine.update(world.publisher.describe(3))
        assert world.is_served()

    asyncio.run(main())


def test_an_engine_with_half_an_update_serves_nothing_until_it_gets_a_full_one() -> None:
    """Without staging, damage shows when it has been loaded."""

    async def main() -> None:
        world = Changing("in_process")
        update = world.publish(1)
        assert update.selection == "full"
        world.exchange[update.buckets[0]][5] ^= 1
        with pytest.raises(FingerprintMismatch):
            await world.engine.update(update)
        with pytest.raises(EngineLost, match="engine0 has failed: version 1: 1 of"):
            await anext(world.engine.generate(ask("b")))
        with pytest.raises(EngineLost, match="engine0 has failed"):
            world.engine.name_version(7)
        with pytest.raises(EngineLost, match="engine0 has failed"):
            await anext(world.engine.generate(ask("b2")))
        world.publisher.release(1)
        with pytest.raises(BaseMissing, match="has weights of no version, got an update to 2"):
            await world.engine.update(world.publish(2))
        await world.engine.update(world.publisher.describe(2, full=True))
        await world.driver.start(ask("c", max_tokens=2))
        await world.driver.drain()
        assert world.driver.versions("c") == [2, 2]
        assert world.is_served()

    asyncio.run(main())


def test_answers_wait_while_an_engine_has_half_an_update_and_go_on_with_a_whole_one() -> None:
    async def main() -> None:
        world = Changing("in_process")
        lost = asyncio.Event()
        pool = EnginePool({"engine0": world.engine})
        pool.on_lost = lambda name, error: lost.set()
        running = asyncio.create_task(world.engine.run())
        versions: list[int] = []
        begun = asyncio.Event()

        async def answer() -> None:
            async for chunk in pool.generate(ask("a", max_tokens=40, seed=1, chunk_tokens=1)):
                versions.extend(chunk.versions.tolist())
                begun.set()

        answering = asyncio.create_task(answer())
        await begun.wait()
        world.train()
        update = world.publish(1)
        world.exchange[update.buckets[0]][5] ^= 1
        with pytest.raises(FingerprintMismatch):
            await pool.update(update)
        await lost.wait()
        later = asyncio.create_task(anext(pool.generate(ask("b", max_tokens=1))))
        await asyncio.sleep(0)
        assert not answering.done()
        assert not later.done()
        world.exchange[update.buckets[0]][5] ^= 1
        await pool.update(world.publisher.describe(1, full=True))
        await answering
        assert (await later).versions.tolist() == [1]
        assert world.is_served()
        assert len(versions) == 40
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        await world.engine.close()
        await running

    asyncio.run(main())
