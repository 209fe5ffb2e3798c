"""Runs `penstock serve`: the embedded engine behind OpenAI's and vLLM's routes."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.api import cache_folder
from penstock.channel.token_file import read_token
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.demo.model import open_builtin
from penstock.engines.config import EngineConfig
from penstock.errors import UserError
from penstock.placement.shares import usable_cores
from penstock.serve.serving import ServeSettings, serve
from penstock.worker.quiet import quieten


def engine_section(overrides: Sequence[str]) -> EngineConfig:
    for word in overrides:
        if not word.startswith("engine."):
            raise UserError(f"penstock serve takes settings of the engine section, got {word!r}")
    return load_config(PenstockConfig, None, overrides).engine


def serve_model(
    model: str,
    *,
    name: str,
    host: str,
    port: int,
    token_file: Path | None,
    allow_hosts: tuple[str, ...] = (),
    updates: bool,
    overrides: Sequence[str],
) -> None:
    settings = ServeSettings(
        model=model,
        name=name or model,
        host=host,
        port=port,
        token="" if token_file is None else read_token(token_file),
        allow_hosts=allow_hosts,
        updates=updates,
    )
    settings.check()
    config = engine_section(overrides)
    quieten()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    folder = open_builtin(model, cache_folder(), log=lambda line: print(line, file=sys.stderr))
    settings = settings.of_folder(folder)
    import torch

    torch.set_num_threads(config.threads or usable_cores())
    asyncio.run(serve(settings, config, lambda line: print(line, flush=True)))
