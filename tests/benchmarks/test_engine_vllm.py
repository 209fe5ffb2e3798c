import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import engine_vllm
from tests.bench.test_engine_cpu import SHAPE
from tests.engines.vllm.fake_program import fake_vllm

pytestmark = pytest.mark.processes


def test_both_answer_the_same_requests(tmp_path: Path) -> None:
    out = io.StringIO()
    result = engine_vllm.run(
        tmp_path / "r.json",
        command=fake_vllm(tmp_path),
        shapes=(SHAPE,),
        longest=9,
        threads=1,
        console=Console(file=out, width=100),
    )
    toy = result["shapes"]["toy"]
    assert len(toy["seconds"]["vllm"]) == 2
    rates = toy["useful_tokens_per_s"]
    assert toy["vs_vllm"] == pytest.approx(rates["penstock"] / rates["vllm"])
    assert json.loads((tmp_path / "r.json").read_text())["headline"] == {"vs_vllm": toy["vs_vllm"]}
    assert "embedded" in out.getvalue()
    assert "vllm" in out.getvalue()
