"""The bench itself, small: both ways give every token, and the report says what was measured."""

import io
import json
from pathlib import Path

from rich.console import Console

from penstock.bench.serve_load import WAYS, Load, run
from penstock.bench.serve_prompts import prompt, prompt_text


def test_it_measures_both_ways_and_says_what_http_costs(tmp_path: Path) -> None:
    out = io.StringIO()
    load = Load(streams=3, tokens=5, processes=2, rounds=1)
    run(tmp_path / "report.json", shape=None, load=load, console=Console(file=out, width=120))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["shape"], report["streams"], report["client_processes"]) == ("tiny", 3, 2)
    rates = [report[f"{name}_tokens_per_s"] for name in WAYS]
    assert min(rates) > 0
    assert report["http_cost"] == 1 - rates[1] / rates[0]
    assert report["chat_cost"] == 1 - rates[3] / rates[0]
    assert "HTTP costs" in out.getvalue()


def test_prompts_are_digits_and_differ() -> None:
    assert len(prompt(0)) == 24
    assert set(prompt(3)) == set(range(1, 11))
    assert prompt(0) != prompt(1)
    assert prompt_text(3) == "345678901234567890123456"
