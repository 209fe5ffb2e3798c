import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from penstock.bench import engine_cpu as bench
from penstock.bench.engine_contenders import make_workload, run_engine, run_generate

SHAPE = bench.Shape(
    name="toy",
    rounds=1,
    config={
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
)


def test_lengths_are_log_normal_with_the_longest_as_told() -> None:
    workload = make_workload(300)
    assert workload.prompts.shape == (64, 24)
    assert max(workload.lengths) == 256
    assert min(workload.lengths) >= 1
    assert make_workload(300).lengths == workload.lengths
    many = np.array(make_workload(300, requests=20000, longest=10**6).lengths)
    assert np.percentile(many, 90) / np.median(many) == pytest.approx(5, rel=0.05)


def test_the_engine_gives_every_request_its_length() -> None:
    model, baseline = bench.make_models(SHAPE, "cpu", "float32")
    workload = make_workload(300, requests=6, prompt_tokens=5, longest=9)
    result = run_engine(model, workload, top_p=0.9, record_masks=True)
    assert result.num_tokens == workload.num_useful
    assert sum(len(mask.counts) for mask in result.masks) == workload.num_useful
    assert result.seconds > 0
    assert run_generate(baseline, workload) > 0


def test_the_temperature_gives_about_one_nat() -> None:
    model, baseline = bench.make_models(SHAPE, "cpu", "float32")
    workload = make_workload(300, requests=16, prompt_tokens=5, longest=9)
    temperature = bench.temperature_for(model, workload)
    with torch.no_grad():
        logits = baseline(torch.from_numpy(workload.prompts).long()).logits.double()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    entropy = float(-(logprobs.exp() * logprobs).sum(-1).mean())
    assert entropy == pytest.approx(1.0, abs=0.35)


def test_the_headline_takes_the_worse_shape() -> None:
    ratios = {"vs_continuous_batching": 9.0, "vs_continuous_batching_steady": 2.0, "mask_cost": 0.1}
    first = {**ratios, "vs_generate": 5.0, "tokens_per_s": 4000.0}
    second = {**ratios, "vs_generate": 3.5, "tokens_per_s": 80.0, "mask_cost": 0.02}
    assert bench.headline({"a": first, "b": second}) == {
        "vs_generate": 3.5,
        "vs_continuous_batching": 9.0,
        "vs_continuous_batching_steady": 2.0,
        "tokens_per_s": 80.0,
        "mask_cost": 0.1,
    }


def test_a_whole_run_on_a_toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but transformers' continuous batching, which takes a share of the machine's memory."""
    monkeypatch.setattr(bench, "run_continuous", lambda model, workload: 2.0)
    monkeypatch.setattr(bench, "run_continuous_call", lambda model, workload: 4.0)
    out = Console(file=io.StringIO(), width=120)
    result = bench.run(
        tmp_path / "engine.json", shapes=(SHAPE,), longest=6, threads=1, device="cpu", console=out
    )
    assert json.loads((tmp_path / "engine.json").read_text()) == result
    toy = result["shapes"]["toy"]
    assert toy["vs_continuous_batching"] == pytest.approx(4.0 / toy["seconds"]["penstock"][0])
    assert toy["mask_bytes_per_token"] > 4
    assert "generate" in out.file.getvalue()  # type: ignore[attr-defined]
