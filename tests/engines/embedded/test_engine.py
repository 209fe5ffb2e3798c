from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.interfaces import Engine
from tests.engines.contract import EngineContract
from tests.engines.embedded.tiny import serve


class TestContract(EngineContract):
    @asynccontextmanager
    async def open_engine(self) -> AsyncIterator[Engine]:
        async with serve(max_context=64) as engine:
            yield engine
