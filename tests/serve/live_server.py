"""A real server in the event loop of a test: a tiny model behind HTTP on a free port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engines.config import EngineConfig
from penstock.serve.serving import Opened, ServeSettings, open_engine, served


@dataclass(frozen=True)
class Live:
    address: str
    opened: Opened


@asynccontextmanager
async def serving(model: Path, *, max_context: int = 64, **settings: Any) -> AsyncIterator[Live]:
    chosen = ServeSettings(model=str(model), name="tiny", port=0, **settings)
    config = EngineConfig(
        device="cpu", dtype="float32", max_context=max_context, embedded={"kv_tokens": 8192, "max_batch": 64}
    )
    opened = await open_engine(chosen, config)
    async with served(chosen, opened) as at_work:
        yield Live(at_work.address, opened)
