import json
from pathlib import Path

import pytest

from benchmarks.train_parts import run


def test_steps_shared_prompts_and_optimizer_states_are_measured(tmp_path: Path) -> None:
    run(tmp_path / "parts.json", shape="tiny", length=16, steps=1)
    written = json.loads((tmp_path / "parts.json").read_text())
    groups = written["groups"]
    assert (groups["separate_tokens"], groups["shared_tokens"]) == (16 * 15, 2 * 8 + 16 * 7)
    assert groups["largest_difference"] < 1e-4
    whole = written["whole_steps"]
    assert whole["tokens_per_s"] == pytest.approx(whole["tokens"] / whole["ms"] * 1e3)
    assert whole["micro_batches"] > 1
    assert all(written["optimizer_states"][name]["ms"] > 0 for name in ("float32", "8bit", "cpu"))
    gain = groups["separate_ms"] / groups["shared_ms"]
    assert written["headline"] == {
        "step_tokens_per_s": whole["tokens_per_s"],
        "shared_prompt_gain": pytest.approx(gain),
    }
