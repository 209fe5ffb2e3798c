"""Real processes, a real (tiny) model, and an adapter on it: from training to a merged model."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.cli.main import main
from penstock.config.root import PenstockConfig
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.engine_pool import EnginePool
from penstock.errors import FingerprintMismatch
from penstock.models.load import load_model
from penstock.observe.event_queue import EventQueue
from penstock.planner.simulation import SimulatedScorer, SimulatedTokenizer
from penstock.run.assembly import Parts, build_controller
from penstock.sync.shared_memory import SharedMemoryReceiver
from penstock.worker import trainer_role
from tests.loop.test_controller import Tasks
from tests.rollout.contract import SEVEN
from tests.test_end_to_end import project, train  # noqa: F401  (a fixture)
from tests.worker.test_trainer_role import LORA, START

ADAPTER = ("model.lora.rank=4", "trainer.learning_rate=0.02", "rollout.groups_per_step=2")


def run_cli(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def steps_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 9)[None]).logits  # type: ignore[no-any-return]


@pytest.mark.timeout(400)
def test_an_adapter_from_training_to_a_merged_model(
    project: Path,  # noqa: F811
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = train(*ADAPTER, "run.steps=8", "run.checkpoint_every=5", "algorithm.kl_coef=0.001")
    run = project / "runs" / "run"
    rows = steps_of(run)
    assert summary["steps"] == 8
    assert rows[0]["reference_kl"] == 0.0 < rows[-1]["reference_kl"]
    # Where engine and trainer have the same weights they agree, so the adapter is what generates.
    gaps = [row["logprob_gap_max"] for row in rows if "logprob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-4

    run_cli("resume", "run", "run.steps=12")
    assert [row["step"] for row in steps_of(run)] == list(range(1, 13))

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = logits(base)
    adapted = PeftModel.from_pretrained(base, str(run / "model")).eval()
    rise = logits(adapted).log_softmax(-1)[..., SEVEN] - plain.log_softmax(-1)[..., SEVEN]
    assert rise.mean() > 0.1  # 0.38 to 0.80 over six seeds; sampled rewards of so short a run are noise
    run_cli("export", "run", "--merge", "--to", "merged")
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained("merged")), logits(adapted), atol=1e-4)

    capsys.readouterr()
    for model in ("run", "merged"):
        name = str(run) if model == "run" else model
        words = ("rollout.max_new_tokens=8", "reward.functions=rewards.py:sevens", "run.seed=3")
        run_cli("eval", name, *words, "--tasks", "tasks.jsonl", "--samples", "2")
    of_run, of_merged = [line for line in capsys.readouterr().out.splitlines() if "mean reward" in line]
    assert of_run == of_merged

    start = load_file(run / "model" / "adapter_model.safetensors")
    train(f"model.adapter={run / 'model'}", "trainer.learning_rate=1e-9", "run.steps=1", "run.name=more")
    end = load_file(project / "runs" / "more" / "model" / "adapter_model.safetensors")
    assert start.keys() == end.keys()
    assert all(torch.allclose(start[name], end[name], atol=1e-6) for name in start)


@pytest.mark.full
def test_dora_is_trained_and_served(project: Path) -> None:  # noqa: F811
    train(*ADAPTER, "model.lora.dora=true", "run.steps=3", "staleness.max_staleness=0")
    rows = steps_of(project / "runs" / "run")
    assert len(rows) == 3
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("model.lora.rank=0", "greater than or equal to 1"),
        ("model.lora.targets=[qq_proj]", "has no such layer"),
        ("model.lora.targets=[embed_tokens]", "must not name 'embed_tokens'"),
        ("model.adapter=nowhere", "nowhere is not an adapter"),
    ],
)
def test_what_can_not_be_trained_is_one_sentence_at_the_start(
    project: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    word: str,
    sentence: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "config.yaml", word])
    assert ended.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (project / "runs").exists()


class Dropping(SharedMemoryReceiver):
    """Takes full weights, and says nothing of an adapter that it never copies."""

    def _copy(self, name: str, live: torch.Tensor, published: torch.Tensor) -> None:
        if ".lora_" not in name:
            super()._copy(name, live, published)


@pytest.mark.full
@pytest.mark.parametrize("drops", [False, True])
def test_an_adapter_that_does_not_reach_an_engine_ends_the_run(
    tiny_model: Path, tmp_path: Path, drops: bool
) -> None:
    import msgspec

    start = msgspec.structs.replace(START, model=str(tiny_model), folder=str(tmp_path), lora=LORA)
    service = trainer_role.build_service(start, EventQueue().of("trainer"))
    with torch.no_grad():
        for tensor in service._trainer.weights().values():
            tensor += 0.1
    service._publisher._adapter.release(1)
    service._publisher.snapshot(1, service._trainer.weights())

    async def run() -> None:
        engine = EmbeddedEngine(
            load_model(str(tiny_model)),
            config=EngineConfig.model_validate({"embedded": {"max_adapters": 1}}),
            receiver=Dropping() if drops else SharedMemoryReceiver(),
            versions={"policy": -1},
        )
        config = PenstockConfig.model_validate({"model": {"lora": LORA}})
        parts = Parts(
            engines=EnginePool({"engine0": engine}),
            trainers=[service],
            scorer=SimulatedScorer(score_s=lambda: 0.0, value=lambda task, episode: 0.0),
            tokenizer=SimulatedTokenizer(),
            tasks=Tasks(),
        )
        await build_controller(config, parts).start()
        assert engine.versions == {"policy": 1}

    try:
        if drops:
            with pytest.raises(FingerprintMismatch, match=r"version 1: .*lora_"):
                asyncio.run(run())
        else:
            asyncio.run(run())
    finally:
        service._publisher.close()
