"""The vLLM engine against a server that speaks its dialect. `tests/vllm_live` runs the same contract on a real one."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.engines.vllm.routed_experts import RouterLayout
from penstock.engines.vllm.server import Server
from penstock.engines.vllm.server_client import ServerClient
from penstock.engines.vllm.server_process import ServerProcess, ServerSettings
from penstock.engines.vllm.vllm_engine import VllmEngine
from penstock.engines.vllm.weight_calls import HalfLoaded, WeightCalls
from penstock.errors import BlobLost, DamagedBucket, EngineLost, UserError
from penstock.observe.pulse import Pulse
from penstock.processes.revival import Silence
from penstock.records import Chunk, Interrupt, RoutingShape, TensorSpec, WeightUpdate, since_restart
from penstock.records.interfaces import Engine
from penstock.records.routing_records import fetch_routes
from tests.engines.contract import EngineContract, ask, collect, joined, update_to
from tests.engines.vllm.fake_program import fake_vllm
from tests.engines.vllm.fake_server import NUM_EXPERTS, NUM_LAYERS, TOP_K, VOCAB, FakeVllm, experts_of


@asynccontextmanager
async def opened(fake: FakeVllm, folder: Path, **options: Any) -> AsyncIterator[VllmEngine]:
    async with fake.served(folder / "s") as url:
        client = ServerClient("engine0", url)
        server = Server(client, WeightCalls)
        await server.weights.open(0)
        engine = VllmEngine(
            server,
            name="engine0",
            versions={"policy": 0},
            max_context=fake.max_context,
            vocab_size=VOCAB,
            **options,
        )
        running = asyncio.create_task(engine.run())
        try:
            yield engine
        finally:
            await engine.close()
            await running


class TestContract(EngineContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with opened(FakeVllm(token_s=0.001), self.folder) as engine:
            yield engine


def play(scene: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(100):
            await scene()

    asyncio.run(main())


def published(version: int) -> WeightUpdate:
    """An update with something in it, so that workers are asked to load it."""
    spec = TensorSpec(name="w", shape=(1,), dtype="float32", bucket=0, offset=0, num_bytes=4)
    return WeightUpdate(
        version=version, transport="shared_memory", tensors=(spec,), buckets=("64:/b",), fingerprint={"w": 1}
    )


@pytest.mark.parametrize(
    ("interrupt", "pause"),
    [
        ("inflight", "/pause?mode=keep&clear_cache=false"),
        ("inflight_recompute", "/pause?mode=keep&clear_cache=true"),
        ("drain", "/pause?mode=wait&clear_cache=true"),
        ("abort_resume", "/pause?mode=abort&clear_cache=true"),
        ("abort_retry", "/pause?mode=abort&clear_cache=true"),
    ],
)
def test_an_interrupt_is_a_pause(tmp_path: Path, interrupt: Interrupt, pause: str) -> None:
    async def scene() -> None:
        fake = FakeVllm()
        async with opened(fake, tmp_path) as engine:
            fake.calls.clear()
            await engine.update(published(1), interrupt)
            assert [call for call in fake.calls if call.startswith("/") and "rpc" not in call] == [
                pause,
                "/start_weight_update",
                "/update_weights",
                "/finish_weight_update",
                "/resume",
            ]
            assert fake.calls.index("penstock_stage") < fake.calls.index(pause)
            assert fake.version == "1"

    play(scene)


@pytest.mark.parametrize("interrupt", ["inflight", "inflight_recompute", "abort_resume"])
def test_an_answer_goes_on_and_its_versions_are_exact(tmp_path: Path, interrupt: Interrupt) -> None:
    async def scene() -> None:
        fake = FakeVllm(token_s=0.001)
        async with opened(fake, tmp_path) as engine:
            async with aclosing(engine.generate(ask("a", max_tokens=40))) as answer:
                chunks = [await anext(answer) for _ in range(5)]
                await engine.update(update_to(3), interrupt)
                chunks += [chunk async for chunk in answer]
            tokens = joined(chunks)
            versions = [int(version) for chunk in chunks for version in chunk.versions]
            assert tokens == [(3 + number) % VOCAB for number in range(40)]
            expected = [span for body in fake.bodies for span in [body["cache_salt"]]]
            assert expected == (["policy:0"] if interrupt != "abort_resume" else ["policy:0", "policy:3"])
            assert versions == sorted(versions)
            assert versions[0] == 0 and versions[-1] == 3
            assert not any(chunk.restarts for chunk in chunks)
            if interrupt == "abort_resume":
                begun = versions.index(3)
                assert fake.bodies[1]["token_ids"] == [1, 2, 3, *tokens[:begun]]
                assert fake.bodies[1]["sampling_params"]["max_tokens"] == 40 - begun

    play(scene)


def test_abort_retry_begins_again(tmp_path: Path) -> None:
    async def scene() -> None:
        fake = FakeVllm(token_s=0.001)
        async with opened(fake, tmp_path) as engine:
            async with aclosing(engine.generate(ask("a", max_tokens=20))) as answer:
                chunks = [await anext(answer) for _ in range(5)]
                await engine.update(update_to(3), "abort_retry")
                chunks += [chunk async for chunk in answer]
            kept = since_restart(chunks)
            assert len(joined(list(kept))) == 20
            assert {int(version) for chunk in kept for version in chunk.versions} == {3}
            assert [body["token_ids"] for body in fake.bodies] == [[1, 2, 3], [1, 2, 3]]
            assert (await engine.report()).counters["discarded_tokens"] >= 5

    play(scene)


LAYOUT = RouterLayout(
    shape=RoutingShape(family="Moe", num_layers=2, num_experts=NUM_EXPERTS, top_k=TOP_K),
    layers=(1, 2),
    num_decoder_layers=NUM_LAYERS,
)


def routed(blobs: MemoryBlobs, chunks: Sequence[Chunk]) -> dict[int, list[list[int]]]:
    """Recorded experts by the places of their tokens, each of which is told once."""
    found: dict[int, list[list[int]]] = {}
    for ref in [chunk.routing for chunk in chunks if chunk.routing is not None]:
        assert ref.shape == LAYOUT.shape
        for place, row in enumerate(fetch_routes(blobs, ref).tolist(), ref.start):
            assert place not in found
            found[place] = row
    return found


@pytest.mark.parametrize("interrupt", ["inflight", "drain", "abort_retry"])
@pytest.mark.parametrize("start", [0, 2])
def test_the_experts_of_all_tokens_are_those_that_sampled_them(
    tmp_path: Path, interrupt: Interrupt, start: int
) -> None:
    async def scene() -> None:
        fake, blobs = FakeVllm(token_s=0.001), MemoryBlobs()
        fake.returns_experts = True
        async with opened(fake, tmp_path, blobs=blobs, layout=LAYOUT) as engine:
            assert "routing" in (await engine.report()).capabilities
            request = ask("a", max_tokens=20, record_routing=True, routing_start=start, blob_scope="group-1")
            async with aclosing(engine.generate(request)) as answer:
                chunks = [await anext(answer) for _ in range(5)]
                await engine.update(update_to(3), interrupt)
                chunks += [chunk async for chunk in answer]
            kept = since_restart(chunks)
            versions = [int(version) for chunk in kept for version in chunk.versions]
            # A token is computed with the weights that sample the next one.
            computed_by = {place: versions[max(0, place - 2)] for place in range(start, 22)}
            assert routed(blobs, kept) == {
                place: experts_of(place, version)[1:] for place, version in computed_by.items()
            }

    play(scene)


def test_an_answer_without_its_experts_costs_the_request_and_not_the_engine(tmp_path: Path) -> None:
    async def scene() -> None:
        fake = FakeVllm()
        async with opened(fake, tmp_path, blobs=MemoryBlobs(), layout=LAYOUT) as engine:
            with pytest.raises(BlobLost, match="returned no routed experts for a"):
                await collect(engine.generate(ask("a", max_tokens=4, record_routing=True)))
            assert len(joined(await collect(engine.generate(ask("b", max_tokens=4))))) == 4

    play(scene)


def test_the_rest_of_an_answer_is_drawn_with_another_seed(tmp_path: Path) -> None:
    async def scene() -> None:
        fake = FakeVllm(token_s=0.001)
        async with opened(fake, tmp_path) as engine:
            async with aclosing(engine.generate(ask("a", max_tokens=40, seed=7))) as answer:
                await anext(answer)
                await engine.update(update_to(3), "abort_resume")
                async for _ in answer:
                    pass
            done = len(fake.bodies[1]["token_ids"]) - 3
            assert done > 0
            assert [body["sampling_params"]["seed"] for body in fake.bodies] == [7, 7 + done]

    play(scene)


def test_what_fails_before_the_load_changes_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        fake = FakeVllm()
        async with opened(fake, tmp_path) as engine:
            fake.outcome = {**fake.outcome, "kind": "DamagedBucket", "message": "bucket 0 arrived damaged"}
            with pytest.raises(DamagedBucket, match="arrived damaged"):
                await engine.update(published(1))
            assert fake.version == "0"
            assert fake.calls[-1] == "/resume"
            assert (await engine.report()).versions == {"policy": 0}
            assert len(joined(await collect(engine.generate(ask("a", max_tokens=8))))) == 8

    play(scene)


@pytest.mark.parametrize("how", ["in a worker", "in the server"])
def test_a_half_loaded_server_samples_no_token_before_it_has_whole_weights(tmp_path: Path, how: str) -> None:
    async def scene() -> None:
        fake = FakeVllm(token_s=0.001)
        intact = fake.outcome
        async with opened(fake, tmp_path) as engine:
            async with aclosing(engine.generate(ask("a", max_tokens=50))) as answer:
                await anext(answer)
                if how == "in a worker":
                    fake.outcome = {**intact, "kind": "RuntimeError", "message": "boom", "is_intact": False}
                else:
                    fake.broken = {"/update_weights"}
                with pytest.raises(HalfLoaded, match="boom"):
                    await engine.update(published(1))
                assert "/resume" not in fake.calls
                with pytest.raises(EngineLost):
                    async for _ in answer:
                        pass
            with pytest.raises(EngineLost, match="no longer of use"):
                await collect(engine.generate(ask("b")))
            fake.outcome, fake.broken = intact, set()
            await engine.update(published(2))
            chunks = await collect(engine.generate(ask("c", max_tokens=8)))
            assert {int(version) for chunk in chunks for version in chunk.versions} == {2}

    play(scene)


def test_a_server_that_is_gone_is_an_engine_lost(tmp_path: Path) -> None:
    async def scene() -> None:
        fake = FakeVllm(token_s=0.01)
        async with (
            opened(fake, tmp_path) as engine,
            aclosing(engine.generate(ask("a", max_tokens=50))) as answer,
        ):
            await anext(answer)
            fake.die()
            with pytest.raises(EngineLost):
                async for _ in answer:
                    pass

    play(scene)


@asynccontextmanager
async def started(
    folder: Path, *, restarts: int = 3, token_s: float = 0.002
) -> AsyncIterator[tuple[VllmEngine, "asyncio.Task[None]"]]:
    """An engine with a server of its own, and the task that watches it."""
    command = fake_vllm(folder, token_s)
    process = ServerProcess("engine0", ServerSettings(model="m", command=command, max_context=64))
    await process.start()
    server = Server(ServerClient("engine0", process.url), WeightCalls, process=process, restarts=restarts)
    await server.weights.open(0)
    engine = VllmEngine(server, name="engine0", versions={"policy": 0}, max_context=64, vocab_size=VOCAB)
    running = asyncio.create_task(engine.run())
    try:
        yield engine, running
    finally:
        await engine.close()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.processes
def test_a_server_that_dies_is_started_again_and_waits_for_weights(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(tmp_path, token_s=0.2) as (engine, _):  # 50 tokens are not there before it dies
            first = engine.server_pid
            assert first is not None
            async with aclosing(engine.generate(ask("a", max_tokens=50, chunk_tokens=1))) as answer:
                await anext(answer)
                os.kill(first, signal.SIGKILL)
                with pytest.raises(EngineLost):
                    async for _ in answer:
                        pass
            receipt = None
            while receipt is None:
                with contextlib.suppress(EngineLost):  # it may not have noticed yet
                    receipt = await engine.update(update_to(1))
                await asyncio.sleep(0.05)
            assert engine.server_pid not in (first, None)
            chunks = await collect(engine.generate(ask("b", max_tokens=2)))
            assert {int(version) for chunk in chunks for version in chunk.versions} == {1}

    play(scene)


@pytest.mark.processes
def test_a_server_that_dies_too_often_ends_the_engine(tmp_path: Path) -> None:
    async def scene() -> None:
        async with started(tmp_path, restarts=0) as (engine, running):
            assert engine.server_pid is not None
            os.kill(engine.server_pid, signal.SIGKILL)
            with pytest.raises(UserError, match="its vLLM server has died too often"):
                await running

    play(scene)


class Watch:
    """A clock that a test turns."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_a_core_that_is_stuck_is_noticed_though_its_server_answers(tmp_path: Path) -> None:
    async def scene() -> None:
        fake, clock = FakeVllm(token_s=0.001), Watch()
        pulse = Pulse(clock)
        async with opened(fake, tmp_path) as engine:
            pulse.watch("generating", engine.progress, engine.progress_limit_s)
            silence = Silence(10.0, 0.0, pulse.report())
            assert engine.progress() is None
            async with aclosing(engine.generate(ask("a", max_tokens=40, chunk_tokens=1))) as chunks:
                await anext(aiter(chunks))
                assert pulse.report().quiet_s == 0.0
                fake.get_stuck()
                for now in (0.5, 9.0, 10.5):
                    clock.now = now
                    assert await engine._server.client.status("GET", "/health") == 200
                    silence.hear(clock.now, pulse.report())
                assert silence.look(clock.now) == (
                    "its work (generating) has not moved for 10 s, 10 s are allowed"
                )
            assert engine.progress() is None

    play(scene)


@pytest.mark.parametrize(
    ("interrupt", "held", "is_watched"),
    [
        ("drain", "_do_pause", True),
        ("inflight", "_do_pause", True),
        ("inflight", "_do_update_weights", False),
    ],
)
def test_answers_must_move_until_an_update_has_paused_them(
    tmp_path: Path, interrupt: Interrupt, held: str, is_watched: bool
) -> None:
    """A core that is stuck does not come to a stop either."""
    asked = asyncio.Event()

    async def hold(request: Any, body: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async def scene() -> None:
        fake = FakeVllm(token_s=0.001)
        setattr(fake, held, hold)
        async with (
            opened(fake, tmp_path) as engine,
            aclosing(engine.generate(ask("a", max_tokens=40, chunk_tokens=1))) as chunks,
        ):
            await anext(aiter(chunks))
            updating = asyncio.create_task(engine.update(published(1), interrupt))
            await asked.wait()
            assert (engine.progress() is not None) is is_watched
            updating.cancel()
            await asyncio.gather(updating, return_exceptions=True)

    play(scene)
