import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli.evaluate import evaluate_model, evaluation_config, print_report
from penstock.cli.main import main
from penstock.errors import PenstockError, ScoringFailed, UserError
from penstock.models.config import LoraConfig
from penstock.run.evaluation import Rewards
from penstock.run.evaluation_session import EvaluationReport, prepare_evaluation
from penstock.run.run_folder import last_line
from penstock.trainer.adapter import TrainedAdapter
from tests.models.test_adapter_folder import make as make_adapter


def config_of(
    model: str, *words: str, config: Path | None = None, tasks: str | None = None, samples: int | None = None
):
    return evaluation_config(model, config, words, tasks=tasks, samples=samples)


def test_the_built_in_model_is_evaluated_as_in_the_demo() -> None:
    config = config_of("builtin", samples=4)
    assert config.eval.tasks is not None
    assert config.eval.tasks.source == "builtin:arithmetic"
    assert config.eval.samples == 4
    assert config.model.name == "builtin"


def write(run: Path, config: dict[str, Any]) -> None:
    text = yaml.safe_dump(config)
    (run / "config.yaml").write_text(text + last_line(text))


def test_a_run_whose_config_is_damaged_is_not_evaluated(tmp_path: Path) -> None:
    write(tmp_path, {"rollout": {"max_new_tokens": 7}})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("7", "6"))
    with pytest.raises(UserError, match="is not as Penstock wrote it"):
        config_of(str(tmp_path))


def test_a_run_is_evaluated_with_its_config_and_its_newest_model(tmp_path: Path) -> None:
    write(tmp_path, {"rollout": {"max_new_tokens": 7}, "model": {"name": "a"}})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    config = config_of(str(tmp_path), tasks="other.jsonl")
    assert config.model.name == str(tmp_path / "model")
    assert config.rollout.max_new_tokens == 7
    assert config.eval.tasks is not None
    assert config.eval.tasks.source == "other.jsonl"


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/demo").mkdir(parents=True)
    make_adapter(Path("runs/demo/model"), base_model_name_or_path="the/base")
    write(Path("runs/demo"), {"rollout": {"max_new_tokens": 7}})
    config = config_of("demo")
    assert (config.model.name, config.model.adapter) == ("the/base", "runs/demo/model")
    assert config.rollout.max_new_tokens == 7


@pytest.mark.parametrize("of_run", [True, False])
def test_an_adapter_is_evaluated_with_the_model_below_it(tmp_path: Path, of_run: bool) -> None:
    write(tmp_path, {"rollout": {"max_new_tokens": 7}, "model": {"name": "a", "lora": {"rank": 4}}})
    make_adapter(tmp_path / "model", base_model_name_or_path="the/base")
    config = config_of(str(tmp_path if of_run else tmp_path / "model"))
    assert config.model.name == "the/base"
    assert config.model.adapter == str(tmp_path / "model")
    assert config.model.lora is None
    make_adapter(tmp_path / "model")
    if of_run:
        assert config_of(str(tmp_path)).model.name == "a"
    else:
        with pytest.raises(UserError, match="does not say which model"):
            config_of(str(tmp_path / "model"))


def test_words_go_over_the_config() -> None:
    config = config_of("builtin", "eval.temperature=0", "rollout.max_new_tokens=3")
    assert (config.eval.temperature, config.rollout.max_new_tokens) == (0, 3)


def test_without_tasks_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tasks to evaluate on; name them: --tasks"):
        prepare_evaluation(config_of("some/model"), folder=tmp_path, log=print, cache=tmp_path, gpus=())


def test_a_report_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    report = EvaluationReport(
        reward=0.25, error=0.05, pass_at={1: 0.2, 2: 0.4}, num_tasks=10, num_answers=20, num_failed=1
    )
    print_report(report, "m", correct=1.0)
    out = capsys.readouterr().out
    for words in ("0.250 ± 0.050", "pass@1", "0.200", "pass@2", "0.400", "10, 20", "tasks without a score"):
        assert words in out


@pytest.mark.processes
@pytest.mark.full
def test_the_adapter_is_what_answers(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that makes the model say something else than by itself."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter = TrainedAdapter(model, LoraConfig(rank=1, targets=("down_proj",)), base=str(tiny_model))
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor += 3.0
    adapter.save(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer("1+1=", return_tensors="pt")["input_ids"]
    said = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
    text = tokenizer.decode(said, skip_special_tokens=True)
    Path("tasks.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": text}) + "\n")
    for name in ("adapter", str(tiny_model)):
        with pytest.raises(SystemExit):
            main(["eval", name, "eval.temperature=0", "rollout.max_new_tokens=4", "--tasks", "tasks.jsonl"])
    adapted, plain = [line for line in capsys.readouterr().out.splitlines() if "mean reward" in line]
    assert "1.000" in adapted
    assert "0.000" in plain


@pytest.mark.processes
def test_a_model_is_evaluated(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{a}+1=", "answer": "0"} for a in range(10, 14)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(
        "def always(prompts, completions, trainer_state):\n"
        "    trained = trainer_state.global_step / trainer_state.max_steps\n"
        "    return [trained * (prompt != '10+1=') for prompt in prompts]\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("eval", str(tiny_model), "reward.functions=rewards.py:always", "rollout.max_new_tokens=4"),
                *("--tasks", "tasks.jsonl", "--samples", "2"),
            ]
        )
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "0.750 ± 0.250" in out
    assert "4, 8" in out
    assert not Path("runs").exists()


def test_tasks_that_cant_be_scored_are_said_with_their_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results: list[Rewards] = [ScoringFailed("reward 'right' raised KeyError: 'answer'", "score_error")]

    async def evaluate(prepared: object, log: object) -> list[Rewards]:
        return results

    prepared = SimpleNamespace(model="m", merged_adapter="", heldout=[])
    monkeypatch.setattr("penstock.cli.evaluate.prepare_evaluation", lambda *_, **__: prepared)
    monkeypatch.setattr("penstock.cli.evaluate.evaluate", evaluate)
    with pytest.raises(PenstockError, match="no task could be scored"):
        evaluate_model(config_of("builtin"), correct=1.0)
    said = "1 tasks could not be scored, the first since reward 'right' raised KeyError: 'answer'"
    assert said in capsys.readouterr().err
    results.append([0.5])
    assert evaluate_model(config_of("builtin"), correct=1.0).reward == 0.5
    assert said in capsys.readouterr().err
