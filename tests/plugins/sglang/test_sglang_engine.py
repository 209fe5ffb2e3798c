"""The SGLang engine against a fake of its documentation. Tests of the contract that need another interrupt than
`drain` do not apply to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_engine import SglangEngine
from weight_folders import WeightFolders

from penstock.engines.vllm.server_client import ServerClient
from penstock.errors import PenstockError, RequestRefused
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from tests.engines.contract import ask, collect, joined, play, update_to
from tests.plugins.sglang.fake_server import VOCAB, FakeSglang


@asynccontextmanager
async def opened(fake: FakeSglang, folder: Path) -> AsyncIterator[SglangEngine]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    async with fake.served(folder / "s") as url:
        engine = SglangEngine(
            ServerClient("engine0", url),
            WeightFolders(SharedMemoryReceiver(), model=str(folder / "model"), folder=str(folder)),
            name="engine0",
            versions={"policy": 0},
            max_context=64,
            vocab_size=VOCAB,
        )
        try:
            yield engine
        finally:
            await engine.close()


def test_tokens_are_streamed_with_logprobs_and_versions(tmp_path: Path) -> None:
    async def scene() -> None:
        fake = FakeSglang()
        async with opened(fake, tmp_path) as engine:
            chunks = await collect(engine.generate(ask("a", max_tokens=8, chunk_tokens=3, top_k=0, seed=5)))
            assert joined(chunks) == [3, 4, 5, 6, 7, 8, 9, 10]
            assert [len(chunk.token_ids) for chunk in chunks] == [3, 3, 2]
            assert chunks[-1].finish_reason == "length"
            assert {float(value) for chunk in chunks for value in chunk.logprobs} == {-1.0}
            (body,) = fake.bodies
            assert body["sampling_params"]["top_k"] == -1
            assert body["sampling_params"]["sampling_seed"] == 5
            with pytest.raises(RequestRefused, match="serves policy 'policy'"):
                await collect(engine.generate(ask("b", policy="teacher")))

    play(scene)


def test_weights_are_loaded_from_the_disk_when_answers_have_ended(tmp_path: Path) -> None:
    async def scene() -> None:
        fake = FakeSglang(token_s=0.001)
        tensors = {"w": torch.arange(4.0)}
        publisher = SharedMemoryPublisher(tensors, folder=tmp_path)
        publisher.snapshot(3, tensors)
        async with opened(fake, tmp_path) as engine:
            async with aclosing(engine.generate(ask("a", max_tokens=30))) as answer:
                chunks = [await anext(answer)]
                updating = asyncio.create_task(engine.update(publisher.describe(3), "drain"))
                chunks += [chunk async for chunk in answer]
            assert {int(version) for chunk in chunks for version in chunk.versions} == {0}
            receipt = await updating
            assert receipt.version == 3
            assert receipt.drain_s > 0
            (loaded,) = fake.loaded
            folder = Path(loaded["model_path"])
            assert loaded["flush_cache"] is True
            assert torch.equal(load_file(folder / "model.safetensors")["w"], tensors["w"])
            assert (folder / "config.json").exists()
            later = await collect(engine.generate(ask("b", max_tokens=2)))
            assert {int(version) for chunk in later for version in chunk.versions} == {3}

    play(scene)


def test_every_interrupt_but_drain_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(FakeSglang(), tmp_path) as engine:
            with pytest.raises(
                PenstockError, match="can't update with interrupt 'inflight'; set sync.interrupt=drain"
            ):
                await engine.update(update_to(1))

    play(scene)


def test_close_ends_requests_as_cancelled(tmp_path: Path) -> None:
    async def scene() -> None:
        async with (
            opened(FakeSglang(token_s=0.01), tmp_path) as engine,
            aclosing(engine.generate(ask("a", max_tokens=50))) as answer,
        ):
            await anext(answer)
            await engine.close()
            rest = [chunk async for chunk in answer]
            assert rest[-1].finish_reason == "cancelled"

    play(scene)


def test_tokens_are_the_heartbeat_of_a_server_while_answers_are_under_way(tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(FakeSglang(token_s=0.001), tmp_path) as engine:
            assert engine.progress() is None
            async with aclosing(engine.generate(ask("a", max_tokens=8, chunk_tokens=1))) as answer:
                await anext(answer)
                before = engine.progress()
                await anext(answer)
                after = engine.progress()
            assert before is not None and after is not None and after > before
            assert engine.progress() is None

    play(scene)
