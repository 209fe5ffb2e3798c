import json
from pathlib import Path

import pytest

from benchmarks.train_lora import FULL, run


def test_an_adapter_is_measured_beside_all_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lora.json"
    report = run(path, rank=4, shape="tiny", tokens=32, length=16, steps=1)
    written = json.loads(path.read_text())
    assert written["headline"]["lora_tokens_per_s"] == report["arms"]["lora"]["tokens_per_s"] > 0
    assert set(written["headline"]) == {"lora_tokens_per_s", "lora_peak_gb"}
    arm = written["arms"]["lora"]
    # Per layer q and o (64 by 64), k and v (64 by 32), three of the MLP (64 by 192), each with rank 4 on both sides.
    assert arm["parameters"] == 2 * 4 * (2 * 128 + 2 * 96 + 3 * 256)
    assert arm["tokens_per_s"] == pytest.approx(32 / arm["ms"] * 1e3)
    full = written["arms"][FULL]
    assert full["tokens_per_s"] == pytest.approx(32 / full["ms"] * 1e3)
    assert "a step of 32 tokens" in capsys.readouterr().out
