import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.checksums import write_checksums
from penstock.cli.export import export_model, find_model, model_of
from penstock.cli.main import main
from penstock.durability.kept_checkpoints import keep_reward
from penstock.errors import UserError
from penstock.models.config import LoraConfig
from penstock.trainer.adapter import TrainedAdapter


def make_model(folder: Path, written: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(str(folder.parent.name))
    os.utime(folder / "config.json", (written, written))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints of steps 2 and 4, and the model of the end, written after them."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / "run"
    for step in (2, 4):
        make_model(folder / "checkpoints" / f"step-{step}" / "model", written=step)
        (folder / "checkpoints" / f"step-{step}" / "progress.json").touch()
    make_model(folder / "model", written=5)
    return folder


def test_the_model_of_the_end_is_exported(run: Path) -> None:
    assert export_model(run, step=None, to=None) == Path("run")
    assert Path("run/config.json").read_text() == "run"
    assert Path("run").stat().st_mode & 0o777 == 0o755


def test_the_model_of_a_step_is_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "run", "--step", "2", "--to", "deep/there"])
    assert ended.value.code == 0
    assert Path("deep/there/config.json").read_text() == "step-2"
    assert "deep/there" in capsys.readouterr().out


def test_a_name_is_a_model_here_then_a_run_then_one_of_the_hub(run: Path) -> None:
    said: list[str] = []
    (run / "config.yaml").touch()
    assert find_model("run", said.append) == ("runs/run/model", run)
    assert find_model("runs/run", said.append) == ("runs/run/model", run)
    assert said == ["run is a run: its model runs/run/model", "runs/run is a run: its model runs/run/model"]
    assert find_model("builtin", said.append) == ("builtin", None)
    make_model(Path("run"), written=1)
    assert find_model("run", said.append) == ("run", None)
    assert len(said) == 2
    assert find_model("other", said.append) == ("other", None)
    assert said[2] == "other is no run and no folder here, so it is looked up on the Hugging Face hub"


def test_a_checkpoint_that_a_resumed_run_has_reached_is_newer_than_the_old_end(run: Path) -> None:
    os.utime(run / "checkpoints" / "step-4" / "model" / "config.json", (9, 9))
    assert model_of(run) == run / "checkpoints" / "step-4" / "model"


def test_the_best_is_the_one_with_the_highest_held_out_reward(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no checkpoint that was evaluated"):
        model_of(run, "best")
    for step, reward in ((2, 0.5), (4, 0.25)):
        keep_reward(run / "checkpoints" / f"step-{step}", reward)
    with pytest.raises(SystemExit):
        main(["export", "run", "--step", "best"])
    assert Path("run-step-best/config.json").read_text() == "step-2"
    with pytest.raises(SystemExit) as ended:
        main(["export", "run", "--step", "last"])
    assert ended.value.code == 2
    assert "must be the step of a checkpoint, or best, got 'last'" in capsys.readouterr().err


def test_what_is_not_there_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 3; it has checkpoints of steps: 2, 4"):
        model_of(run, 3)
    with pytest.raises(UserError, match="has no model yet"):
        model_of(tmp_path)


@pytest.mark.parametrize(("step", "folder"), [(None, "model"), (2, "checkpoints/step-2")])
def test_a_damaged_model_is_not_exported(run: Path, step: int | None, folder: str) -> None:
    write_checksums(run / folder)
    export_model(run, step=step, to=Path("good"))
    assert not Path("good/checksums.json").exists()
    path = next((run / folder).rglob("config.json"))
    before = path.stat()
    path.write_text("9" * before.st_size)
    os.utime(path, (before.st_mtime, before.st_mtime))
    with pytest.raises(UserError, match="config.json is damaged"):
        export_model(run, step=step, to=Path("bad"))


def test_nothing_is_overwritten(run: Path) -> None:
    Path("run").mkdir()
    with pytest.raises(UserError, match="run exists already; name another folder with --to"):
        export_model(run, step=None, to=None)


@pytest.fixture
def lora_run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that trained an adapter of a model that is stored in 16 bits."""
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model.save_pretrained("base")
    adapter = TrainedAdapter(model.float(), LoraConfig(rank=2), base=str(tmp_path / "base"))
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor += 0.05
    run = Path("runs") / "lora"
    (run / "model").mkdir(parents=True)
    adapter.save(run / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(run / "model")
    (run / "config.yaml").write_text("model: {name: base}")
    return run


def test_an_adapter_is_exported_for_peft(lora_run: Path) -> None:
    assert model_of(lora_run) == lora_run / "model"
    export_model(lora_run, step=None, to=Path("out"))
    base = AutoModelForCausalLM.from_pretrained("base")
    assert PeftModel.from_pretrained(base, "out").peft_config["default"].r == 2


@pytest.mark.processes
def test_merged_it_is_an_ordinary_model_in_the_format_that_it_came_in(lora_run: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "lora", "--merge", "--to", "merged"])
    assert ended.value.code == 0
    names = {path.name for path in Path("merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= names
    assert not any(name.startswith("adapter") for name in names)
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    base = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(lora_run / "model"))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        close = (merged.float()(ids).logits - adapted(ids).logits).abs().max()
        far = (merged(ids).logits - AutoModelForCausalLM.from_pretrained("base")(ids).logits).abs().max()
    assert close < 0.1 < far
    AutoTokenizer.from_pretrained("merged")


def test_a_whole_model_has_nothing_to_merge(run: Path) -> None:
    with pytest.raises(UserError, match="nothing to merge; leave --merge out"):
        export_model(run, step=None, to=None, merge=True)
