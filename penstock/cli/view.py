"""`penstock view`: the web page of one or several runs, until Ctrl-C."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.channel.token_file import read_token
from penstock.cli.samples import run_folder
from penstock.dashboard.serving_page import served_page
from penstock.observe.page_address import bind, new_token, page_address
from penstock.observe.reading.run_reading import RunReading

PORT = 8421
"""Where it listens, or on a free port if this one is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSettings:
    host: str = "127.0.0.1"
    port: int = PORT
    token_file: Path | None = None
    allow_hosts: tuple[str, ...] = ()


def view_runs(runs: Sequence[str], settings: ViewSettings, say: Callable[[str], None] = print) -> None:
    readings = [RunReading(run_folder(run)) for run in runs]
    for reading in readings:
        reading.refresh()  # whoever opens the address finds it read, texts indexed
        reading.status()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(readings, settings, say))


async def _serve(readings: Sequence[RunReading], settings: ViewSettings, say: Callable[[str], None]) -> None:
    token = new_token() if settings.token_file is None else read_token(settings.token_file)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    with bind(settings.host, settings.port, or_another=settings.port == PORT) as listening:
        async with served_page(readings, listening, token=token, allow_hosts=settings.allow_hosts):
            say(f"{page_address(listening, token)} (Ctrl-C ends)")
            await ended.wait()
