"""The bench itself, small: both ways give every token, and the report says what was measured."""

import asyncio
import io
import json
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.serve_load import CHAT_TEMPLATE, WAYS, Load, base_settings, counted, over_http, run
from penstock.bench.serve_prompts import prompt, prompt_text
from penstock.bench.shapes import save_shape
from penstock.cli.serve import engine_section
from penstock.engines.config import EngineConfig
from penstock.errors import PenstockError
from penstock.serve.serving import ServeSettings, open_engine, served

pytestmark = pytest.mark.processes


def test_it_measures_both_ways_and_says_what_http_costs(tmp_path: Path) -> None:
    out = io.StringIO()
    load = Load(streams=3, tokens=5, processes=2, rounds=1)
    config = engine_section([*base_settings(load), "engine.max_context=64", "engine.device=cpu"])
    run(tmp_path / "report.json", shape=None, load=load, config=config, console=Console(file=out, width=120))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["shape"], report["streams"], report["client_processes"]) == ("tiny", 3, 2)
    rates = [report[f"{name}_tokens_per_s"] for name in WAYS]
    assert min(rates) > 0
    assert report["http_cost"] == 1 - rates[1] / rates[0]
    assert report["chat_cost"] == 1 - rates[3] / rates[0]
    assert report["compile"] == "off"
    assert "HTTP costs" in out.getvalue()


def test_a_refusal_is_not_a_quick_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """Prompts of 24 tokens do not fit: clients say so, and there is no figure."""
    load = Load(streams=1, tokens=5, processes=1, rounds=1)
    config = engine_section([*base_settings(load), "engine.max_context=16", "engine.device=cpu"])
    with pytest.raises(PenstockError, match="a client of generate failed"):
        asyncio.run(over_http_alone(load, config))
    assert "/inference/v1/generate answered 400: " in capfd.readouterr().err


async def over_http_alone(load: Load, config: EngineConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_shape("tiny", Path(folder) / "model", "cpu", CHAT_TEMPLATE)
        settings = ServeSettings(model=str(Path(folder) / "model"), port=0)
        async with served(settings, await open_engine(settings, config)) as serving:
            await over_http(serving.address, load, "generate")


def test_missing_tokens_are_no_speed() -> None:
    load = Load(streams=3, tokens=5, processes=2)
    assert counted("chat", 15, load) == 15
    with pytest.raises(PenstockError, match="chat: 14 tokens arrived, and 3 streams of 5 must give 15"):
        counted("chat", 14, load)


def test_prompts_are_digits_and_differ() -> None:
    assert len(prompt(0)) == 24
    assert set(prompt(3)) == set(range(1, 11))
    assert prompt(0) != prompt(1)
    assert prompt_text(3) == "345678901234567890123456"
