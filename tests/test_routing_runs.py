"""Real processes, a real (tiny) mixture of experts: its experts travel from engines to training steps."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.main import main
from tests.test_end_to_end import project, train  # noqa: F401  (a fixture)

pytestmark = pytest.mark.full

WORKFLOW = """
async def twice(task, rollout):
    first = await rollout.generate(task.prompt)
    await rollout.generate(rollout.continue_(first, task.prompt))
"""
SHOWN = {"routing_replayed", "routing_fallbacks", "routing_flipped", "routing_gap", "routing_gap_without"}


@pytest.fixture(scope="module")
def mixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of eight experts, of which two are chosen, over the tokens of the tiny model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("mixture") / "model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=14,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def train_mixture(mixture: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Two turns an episode, by a workflow in a process of its own; the summary, and the metrics of every step."""
    Path("workflow.py").write_text(WORKFLOW)
    summary = train(
        f"model.name={mixture}",
        "rollout.workflow=workflow.py:twice",
        "rollout.workers=1",
        "rollout.groups_per_step=3",
        "trainer.micro_batch_tokens=256",
        *words,
    )
    newest = max(Path("runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    rows = [json.loads(line) for line in (newest / "metrics.jsonl").read_text().splitlines()]
    return summary, [row for row in rows if "loss" in row]


@pytest.mark.timeout(300)
def test_every_choice_is_replayed_and_in_float32_nothing_flips(project: Path, mixture: Path) -> None:  # noqa: F811
    """Several turns, shared prompts, several passes, and a reference that replays too."""
    summary, steps = train_mixture(
        mixture,
        "staleness.max_staleness=0",
        "trainer.passes=2",
        "algorithm.kl_coef=0.01",
        "trainer.replay_reference=true",
        "engine.count=2",
        "run.steps=4",
    )
    assert (summary["steps"], summary["drops"]) == (4, {})
    assert len(steps) == 4
    for step in steps:
        assert step.keys() >= SHOWN
        assert (step["routing_replayed"], step["routing_fallbacks"], step["routing_flipped"]) == (
            1.0,
            0.0,
            0.0,
        )
        assert step["routing_gap"] == pytest.approx(step["routing_gap_without"], abs=1e-6)
        assert max(step["routing_gap"], step["logprob_gap_max"]) < 1e-4
        assert step["prompt_tokens_shared"] > 0
    assert 0 < steps[0]["reference_kl"] < steps[-1]["reference_kl"]  # means over both passes


@pytest.mark.timeout(300)
def test_an_engine_that_rounds_flips_choices_and_replay_narrows_the_gap(
    project: Path,  # noqa: F811
    mixture: Path,
) -> None:
    """Asynchronous: choices flip by rounding and by the age of tokens. Steps are not so large that the weights
    of the same experts explain the whole gap (at 0.01 they do: 0.88 to 1.00 of the gap stays)."""
    summary, steps = train_mixture(
        mixture, "engine.dtype=bfloat16", "run.steps=12", "trainer.learning_rate=0.001"
    )
    assert (summary["steps"], summary["drops"]) == (12, {})
    assert all(step.keys() >= SHOWN for step in steps)
    assert {(step["routing_replayed"], step["routing_fallbacks"]) for step in steps} == {(1.0, 0.0)}
    assert 0.01 < max(step["routing_flipped"] for step in steps) < 0.9
    with_replay, without = (
        sum(step[name] for step in steps) for name in ("routing_gap", "routing_gap_without")
    )
    assert 0 < with_replay < 0.95 * without  # 0.82 to 0.86 over three seeds


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", "config.yaml", *words])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_dense_model_whose_experts_should_be_recorded_is_refused(
    project: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal(capsys, "engine.record_routing=on")
    assert "engine.record_routing=on needs a model with experts, and " in said and "has none" in said
    assert not Path("runs").exists()  # no process was started


def test_a_family_whose_choice_is_not_found_is_refused_by_name(
    project: Path,  # noqa: F811
    mixture: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where nothing was asked for: training it without replay is for the user to say."""
    odd = shutil.copytree(mixture, project / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"n_routed_experts": 9}))
    said = refusal(capsys, f"model.name={odd}", "run.steps=1")
    assert "Qwen3MoeForCausalLM's choice of experts can't be recorded" in said
    assert "set engine.record_routing=off to train it without" in said
    _, (step,) = train_mixture(odd, "run.steps=1", "engine.record_routing=off")
    assert not any(name.startswith("routing_") for name in step)
