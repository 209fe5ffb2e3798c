"""Engines of every kind are opened by one function, and keep one contract."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import pytest

from penstock.blobs import MemoryBlobs
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.config import EmbeddedConfig
from penstock.engines.kinds import KINDS, EngineParts, ServedEngine, open_engine
from penstock.errors import UserError
from penstock.interfaces import Engine
from penstock.types import DEFAULT_POLICY
from tests.engines import scripted_kind
from tests.engines.contract import EngineContract
from tests.engines.embedded.tiny import NoWeights


def parts_for(model: str) -> EngineParts:
    return EngineParts(
        name="engine7",
        model=model,
        device="cpu",
        config=EngineConfig(dtype="float32", max_context=64, embedded=EmbeddedConfig(kv_tokens=1024)),
        receiver=NoWeights(),
        blobs=MemoryBlobs(),
        versions={DEFAULT_POLICY: 0},
    )


@asynccontextmanager
async def serving(engine: ServedEngine) -> AsyncIterator[Engine]:
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        try:
            yield engine
        finally:
            await engine.close()


class TestEmbedded(EngineContract):
    @pytest.fixture(autouse=True)
    def _model(self, tiny_model: Path) -> None:
        self.model = str(tiny_model)

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with serving(await open_engine("embedded", parts_for(self.model))) as engine:
            yield engine


class TestScripted(EngineContract):
    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        opened = await open_engine("scripted", parts_for(""), scripted_kind.KINDS)
        async with serving(opened) as engine:
            yield engine


def test_an_engine_has_the_name_and_the_versions_that_it_was_given() -> None:
    async def main() -> None:
        engine = await open_engine("scripted", parts_for(""), scripted_kind.KINDS)
        report = await engine.report()
        assert (report.name, report.versions) == ("engine7", {DEFAULT_POLICY: 0})

    asyncio.run(main())


def test_a_kind_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="engine.kind must be one of embedded, sglang, vllm, got 'vlm'"):
        asyncio.run(open_engine("vlm", parts_for("")))


def test_the_config_knows_every_kind_and_has_a_section_for_each() -> None:
    assert set(get_args(EngineConfig.model_fields["kind"].annotation)) == set(KINDS)
    assert set(KINDS) <= set(EngineConfig.model_fields)


def test_kinds_are_known_without_what_they_need() -> None:
    code = "import sys, penstock.engines.kinds; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
