"""Runs `penstock serve`: the embedded engine behind OpenAI's and vLLM's routes."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.api import cache_folder
from penstock.channel.token_file import read_token
from penstock.cli.export import find_model, to_stderr
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.demo.model import open_builtin
from penstock.engines.config import EngineConfig
from penstock.errors import UserError
from penstock.http_server.hub_access import check_hub
from penstock.models.adapter_folder import model_below
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
    found, _ = find_model(model, to_stderr)
    folder, adapter = model_below(open_builtin(found, cache_folder(), log=to_stderr))
    check_hub(folder, to_stderr)
    settings = settings.of_folder(folder, "" if adapter is None else str(adapter))
    import torch

    torch.set_num_threads(config.threads or usable_cores())
    asyncio.run(serve(settings, config, lambda line: print(line, flush=True)))
