import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.engines.vllm.adapter_files import AdapterFiles
from penstock.errors import FingerprintMismatch, PenstockError
from penstock.records import AdapterSpec, WeightUpdate
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from penstock.sync.slot_publisher import Publishing
from tests.engines.contract import ask, collect, play, update_to
from tests.engines.vllm.fake_server import FakeVllm
from tests.engines.vllm.test_vllm_engine import opened

LAYER = "model.layers.0.self_attn.q_proj"


class Published:
    """Versions of one adapter."""

    def __init__(self, folder: Path, *, dora: bool = False) -> None:
        self._tensors = {
            f"{LAYER}.lora_A.weight": torch.ones(2, 4),
            f"{LAYER}.lora_B.weight": torch.ones(4, 2),
        }
        publishing = Publishing(
            selection="adapter", base=0, adapter=AdapterSpec(rank=2, alpha=4.0, dora=dora), slots=8
        )
        self._publisher = SharedMemoryPublisher(self._tensors, publishing, folder=folder)

    def version(self, number: int) -> WeightUpdate:
        for tensor in self._tensors.values():
            tensor.fill_(number)
        self._publisher.snapshot(number, self._tensors)
        return self._publisher.describe(number)


def files(folder: Path) -> AdapterFiles:
    return AdapterFiles(SharedMemoryReceiver(), model="base", folder=str(folder))


def test_an_adapter_is_written_as_peft_saves_it(tmp_path: Path) -> None:
    adapters = files(tmp_path)
    asyncio.run(adapters.write(Published(tmp_path).version(3)))
    (folder,) = tmp_path.glob("penstock-adapters-*/version3")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert list(tensors) == [
        f"base_model.model.{LAYER}.lora_A.weight",
        f"base_model.model.{LAYER}.lora_B.weight",
    ]
    assert all(torch.equal(tensor, torch.full_like(tensor, 3)) for tensor in tensors.values())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 4.0, ["q_proj"])


def test_an_adapter_that_is_not_the_trainers_is_refused(tmp_path: Path) -> None:
    update = Published(tmp_path).version(3)
    update.fingerprint[f"{LAYER}.lora_A.weight"] += 1
    with pytest.raises(FingerprintMismatch):
        asyncio.run(files(tmp_path).write(update))


def test_dora_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="no DoRA"):
        asyncio.run(files(tmp_path).write(Published(tmp_path, dora=True).version(3)))


def test_requests_keep_the_adapter_that_they_began_with(tmp_path: Path) -> None:
    async def scene() -> None:
        fake, published = FakeVllm(token_s=0.001), Published(tmp_path)
        async with opened(fake, tmp_path, adapters=files(tmp_path)) as engine:
            assert "adapters" in (await engine.report()).capabilities
            await engine.update(published.version(1), "drain")
            async with aclosing(engine.generate(ask("a", max_tokens=40))) as answer:
                chunks = [await anext(answer)]
                await engine.update(published.version(2), "drain")
                assert fake.adapters == ["policy@1", "policy@2"]
                later = await collect(engine.generate(ask("b", max_tokens=4)))
                third = asyncio.create_task(engine.update(published.version(3), "drain"))
                chunks += [chunk async for chunk in answer]
            assert (await third).version == 3
            assert fake.adapters == ["policy@2", "policy@3"]
            assert {int(version) for chunk in chunks for version in chunk.versions} == {1}
            assert {int(version) for chunk in later for version in chunk.versions} == {2}
            assert [body["model"] for body in fake.bodies] == ["policy@1", "policy@2"]
            await engine.close()
            assert fake.adapters == []

    play(scene)
    assert not list(tmp_path.glob("penstock-adapters-*"))


def test_every_interrupt_but_drain_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(FakeVllm(), tmp_path, adapters=files(tmp_path)) as engine:
            with pytest.raises(
                PenstockError, match="can't update with interrupt 'inflight'; set sync.interrupt=drain"
            ):
                await engine.update(update_to(1), "inflight")

    play(scene)
