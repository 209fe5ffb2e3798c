import sys
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config.loader import load_config
from penstock.orchestration.config import PenstockConfig


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_init_writes_a_config_that_loads_and_says_every_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("init") == 0
    assert load_config(PenstockConfig, Path("penstock.yaml")) == PenstockConfig()
    text = Path("penstock.yaml").read_text()
    overridden = load_config(PenstockConfig, Path("penstock.yaml"), ["rollout.group_size=16"])
    assert overridden.rollout.group_size == 16
    for key in ("max_staleness: 4", "group_size: 8", "learning_rate: ", "transport: shared_memory"):
        assert f"  # {key}" in text


def test_init_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("penstock.yaml").write_text("mine")
    assert call("init") == 2
    assert capsys.readouterr().err == "error: penstock.yaml exists already; name another file or remove it\n"
    assert Path("penstock.yaml").read_text() == "mine"


def test_list_algorithms_prints_a_line_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert call("list", "algorithms") == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("grpo", "clip", "truncated_token", "k3", "zero_variance"):
        assert [line for line in lines if line.split()[:1] == [name]], name


def test_generate_answers_by_hand(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("generate", str(tiny_model), "1+2=", "3+4=", "--max-tokens", "4", "--seed", "1") == 0
    first = capsys.readouterr().out
    assert [line.split(" → ")[0] for line in first.splitlines()] == ["1+2=", "3+4="]
    assert call("generate", str(tiny_model), "1+2=", "3+4=", "--max-tokens", "4", "--seed", "1") == 0
    assert capsys.readouterr().out == first


def test_generate_refuses_bad_sampling_in_one_sentence(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("generate", str(tiny_model), "1+2=", "--top-p", "0") == 2
    assert capsys.readouterr().err == "error: top_p must be in (0, 1], got 0.0\n"


def test_a_missing_extra_is_named_in_full_and_leaves_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert call("train", "observe.wandb=true") == 2
    assert capsys.readouterr().err == "error: observe.wandb needs wandb: pip install 'penstock[wandb]'\n"
    assert list(tmp_path.iterdir()) == []
