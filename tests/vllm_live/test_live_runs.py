"""Whole runs of the demo on a real server."""

import asyncio
import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.vllm_live.live import ADAPTER_RANK, reset_weights


@pytest.mark.smoke
@pytest.mark.timeout(600)
def test_the_demo_learns_on_vllm(
    server: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["engine.kind=vllm", f"engine.vllm.urls=[{server}]", "engine.max_context=64", "run.steps=30"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    asyncio.run(reset_weights(server, model, tmp_path))
    assert ended.value.code == 0
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    rows = [
        json.loads(line) for line in (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if "reward_mean" in row]
    assert len(trained) == 30
    assert trained[-1]["reward_mean"] > trained[0]["reward_mean"] + 0.2
    gaps = [row["logprob_gap_max"] for row in trained if "logprob_gap_max" in row]
    assert max(gaps) < 1e-3
    assert summary["steps"] == 30


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["both kinds of engines", "two ranks", "an adapter"])
def test_short_runs(
    server: str,
    request: pytest.FixtureRequest,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Three steps of the demo: what was sampled is what the trainer computes for it."""
    monkeypatch.chdir(tmp_path)
    words = ["engine.beside={vllm: 1}"]
    if kind == "two ranks":
        words = ["trainer.parallel.shard=2", "engine.kind=vllm"]
    if kind == "an adapter":
        server = request.getfixturevalue("adapter_server")
        words = [f"model.lora.rank={ADAPTER_RANK}", "sync.interrupt=drain", "engine.kind=vllm"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, f"engine.vllm.urls=[{server}]", "engine.max_context=64", "run.steps=3"])
    asyncio.run(reset_weights(server, model, tmp_path))
    assert ended.value.code == 0
    rows = [
        json.loads(line) for line in (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    ]
    gaps = [row["logprob_gap_max"] for row in rows if "logprob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-3
    assert json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())["steps"] == 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rollout.top_p=0.9"], "lacks sampling_mask (for rollout.top_p=0.9)"),
        (["sync.selection=delta"], "lacks delta (for sync.selection=delta)"),
    ],
)
def test_what_vllm_lacks_is_refused_at_the_start(
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "engine.kind=vllm", f"engine.vllm.urls=[{server}]", "engine.max_context=64", *words])
    assert ended.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
