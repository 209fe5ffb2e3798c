"""Every capability that the vLLM engine declares, on a real server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.models.tokenizer import ChatTokenizer
from penstock.records.interfaces import Engine
from tests.engines.capability_contract import CapabilityContract, Stage
from tests.engines.contract import EngineContract
from tests.vllm_live.live import CONTEXT, LONG, load, opened, parts_of


@pytest.mark.timeout(300)
class TestLive(EngineContract, CapabilityContract):
    context = CONTEXT
    long = LONG
    updates = (3, 4, 5, 6)

    @pytest.fixture(autouse=True)
    def _server(self, server: str, model: str) -> None:
        self.model = model
        self.parts = parts_of(model, urls=(server,), context=CONTEXT)

    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with opened(self.parts) as engine:
            yield engine

    @asynccontextmanager
    async def open_stage(self) -> AsyncIterator[Stage]:
        async with opened(self.parts) as engine:
            yield Stage(engine, load(self.model), ChatTokenizer(self.model).decode)
