"""What a server must be like where the experts of a mixture are recorded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.blob_stores import MemoryBlobs
from penstock.demo.model import Recipe
from penstock.demo.supervised_start import make_tokenizer
from penstock.engines.config import EngineConfig
from penstock.engines.kinds import EngineParts
from penstock.engines.vllm.config import VllmConfig
from penstock.engines.vllm.vllm_opening import open_vllm
from penstock.errors import UserError
from tests.engines.contract import ask, collect
from tests.engines.vllm.fake_server import NUM_EXPERTS, FakeVllm
from tests.models.moe import CONFIGS


def model_in(folder: Path) -> Any:
    """A mixture whose routers are those of the fake server; returns its tokenizer."""
    kind, sizes = CONFIGS["qwen3-moe"]
    tokenizer = make_tokenizer(Recipe())
    config = kind(
        **{**sizes, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 3},
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def parts(folder: Path, record_routing: str, urls: tuple[str, ...] = ()) -> EngineParts:
    config = EngineConfig(
        kind="vllm",
        dtype="float32",
        device="cpu",
        max_context=64,
        record_routing=record_routing,
        vllm=VllmConfig(urls=urls),
    )
    return EngineParts(
        name="engine0",
        model=str(folder),
        device="cpu",
        config=config,
        receiver=None,  # type: ignore[arg-type]  # no weights come
        blobs=MemoryBlobs(),
        versions={"policy": 0},
        folder=str(folder),
    )


@pytest.mark.parametrize("records", [True, False])
def test_a_server_that_tells_experts_has_them_recorded_where_that_is_asked_for(
    tmp_path: Path, records: bool
) -> None:
    tokenizer = model_in(tmp_path)

    async def scene() -> None:
        fake = FakeVllm(tokenize=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        fake.returns_experts = True
        fake.sizes = {"vocab_size": len(tokenizer)}
        async with fake.served(tmp_path / "s") as url:
            engine = await open_vllm(parts(tmp_path, "on" if records else "off", (url,)))
            try:
                assert ("routing" in (await engine.report()).capabilities) is records
                chunks = await collect(engine.generate(ask("a", max_tokens=4, record_routing=True)))
                refs = [chunk.routing for chunk in chunks if chunk.routing is not None]
                assert [(ref.start, ref.end, ref.shape.num_layers) for ref in refs] == [(0, 6, 3)] * records
            finally:
                await engine.close()

    asyncio.run(scene())


def test_a_server_that_tells_none_is_refused_where_they_are_recorded(tmp_path: Path) -> None:
    tokenizer = model_in(tmp_path)

    async def scene() -> None:
        fake = FakeVllm()
        fake.sizes = {"vocab_size": len(tokenizer)}
        async with fake.served(tmp_path / "s") as url:
            with pytest.raises(UserError, match="start it with --enable-return-routed-experts"):
                await open_vllm(parts(tmp_path, "on", (url,)))

    asyncio.run(scene())


def test_a_server_of_our_own_on_a_cpu_is_not_started(tmp_path: Path) -> None:
    model_in(tmp_path)
    with pytest.raises(UserError, match="needs a GPU: on a CPU vLLM does not return the experts"):
        asyncio.run(open_vllm(parts(tmp_path, "on")))
