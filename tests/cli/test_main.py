import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock.cli.main import main
from penstock.cli.training_commands import print_summary
from penstock.config.loader import load_config
from penstock.config.root import PenstockConfig
from penstock.errors import UserError, WorkerDied
from penstock.observe.run_state import RunState
from penstock.run.summary import summarise
from tests.observe.examples import run_event


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_init_writes_a_config_that_loads_and_says_every_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("init", "--all") == 0
    assert load_config(PenstockConfig, Path("penstock.yaml")) == PenstockConfig()
    text = Path("penstock.yaml").read_text()
    overridden = load_config(PenstockConfig, Path("penstock.yaml"), ["rollout.group_size=16"])
    assert overridden.rollout.group_size == 16
    for key in ("max_staleness: 4", "group_size: 8", "learning_rate: ", "transport: auto"):
        assert f"  # {key}" in text


def test_init_writes_a_short_config_of_a_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("init") == 0
    assert load_config(PenstockConfig, Path("penstock.yaml")).tasks.source == "builtin:arithmetic"
    assert call("init", "mine.yaml", "--like", "lora") == 0
    assert load_config(PenstockConfig, Path("mine.yaml")).model.lora is not None
    assert capsys.readouterr().out.splitlines()[-1].endswith("then: penstock train mine.yaml")
    for words in (("--like", "sft"), ("--like", "chat", "--all")):
        assert call("init", "other.yaml", *words) == 2
        expected = (
            f"error: penstock init takes --all, or --like jsonl|chat|agent|lora, got --like {words[1]}\n"
        )
        assert capsys.readouterr().err == expected


def test_a_full_disk_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(number, words)

    monkeypatch.setattr(Path, "write_text", full)
    number, words = 28, "No space left on device"
    assert call("init") == 2
    assert capsys.readouterr().err == (
        "error: the disk is full ([Errno 28] No space left on device); make room, and give the same command again\n"
    )
    number, words = 5, "Input/output error"
    with pytest.raises(OSError, match="Input/output error"):
        main(["init"])


def test_init_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("penstock.yaml").write_text("mine")
    assert call("init") == 2
    assert capsys.readouterr().err == "error: penstock.yaml exists already; name another file or remove it\n"
    assert Path("penstock.yaml").read_text() == "mine"


HEAVY = ("torch", "transformers", "numpy", "penstock.api", "penstock.run")
LOADED_AT_FIRST = f"""
import os, sys

class Screen:
    def write(self, text):
        if text.strip():
            loaded = [name for name in {HEAVY} if name in sys.modules]
            os.write(1, (text.splitlines()[0] + "|" + ",".join(loaded)).encode())
            os._exit(0)
    def flush(self): pass
    def isatty(self): return False
    encoding = "utf-8"

sys.stdout = Screen()
from penstock.cli.main import main
main()
"""
"""A program that ends with its first line, followed by what it had imported until then."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train",), f"penstock {penstock.__version__}: starting"),
        (("train", "no-such.yaml"), f"penstock {penstock.__version__}: starting"),
        (("resume", "no-such-run"), f"penstock {penstock.__version__}: starting"),
        (("--version",), f"penstock {penstock.__version__}"),
        (("--help",), ""),
    ],
)
def test_the_first_line_comes_before_anything_heavy_is_imported(words: tuple[str, ...], line: str) -> None:
    program = [sys.executable, "-c", LOADED_AT_FIRST, *words]
    first = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout
    shown, _, loaded = first.rpartition("|")
    assert (line in shown, loaded) == (True, "")


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


def test_generate_takes_a_run_by_its_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "runs/demo/model")
    Path("runs/demo/config.yaml").touch()
    words = ("1+2=", "3+4=", "--max-tokens", "4", "--seed", "1")
    assert call("generate", str(tiny_model), *words) == 0
    expected = capsys.readouterr().out
    assert call("generate", "demo", *words) == 0
    assert capsys.readouterr() == (expected, "demo is a run: its model runs/demo/model\n")


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


def test_what_a_dead_worker_said_is_shown_escaped_and_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise WorkerDied("died \x1b[31m", detail="\x1b]0;x\x07" + "y" * 3_000_000)

    monkeypatch.setattr("penstock.api.run", fail)
    assert call("train") == 1
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert len(err) < 25_000
    assert "error: died \\x1b[31m" in err


READER_LEAVES = """
import dataclasses, time
import penstock.api
from penstock.cli import main
from penstock.run.summary import Summary
def run(*_, **__):
    print("a line", flush=True)
    time.sleep(0.5)
    values = {field.name: 0 for field in dataclasses.fields(Summary)}
    return Summary(**values | {"name": "n", "folder": "f", "drops": {}, "failures": {}, "trainer_time": {}, "engine_time": {}})
penstock.api.run = run
main(["train"])
"""


@pytest.mark.parametrize(
    ("folder", "after"),
    [
        (
            "runs/sums-2",
            "next: penstock samples sums-2 · penstock view sums-2 · model in runs/sums-2/model",
        ),
        (
            "/data/my run",
            "next: penstock samples '/data/my run' · penstock view '/data/my run' · model in /data/my run/model",
        ),
    ],
)
def test_the_table_ends_with_what_to_type_next(
    folder: str, after: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = RunState()
    state.on(msgspec.structs.replace(run_event(), name="sums", folder=folder))
    print_summary(summarise(state))
    assert capsys.readouterr().out.splitlines()[-1] == after


@pytest.mark.processes
def test_a_reader_that_leaves_is_no_error() -> None:
    done = subprocess.run(
        ["/bin/bash", "-c", '"$0" -c "$1" | head -2; exit ${PIPESTATUS[0]}', sys.executable, READER_LEAVES],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"penstock {penstock.__version__}: starting\na line\n",
        "",
    )


FAILS_UNREAD = """
import contextlib
import penstock.api
from penstock.cli import main
from penstock.errors import UserError
def run(*_, **__):
    with contextlib.suppress(BrokenPipeError):
        print("a line that nobody reads", flush=True)
    raise UserError("no such model")
penstock.api.run = run
main(["train"])
"""


@pytest.mark.processes
def test_a_reader_that_has_left_does_not_hide_why_a_run_failed() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", FAILS_UNREAD],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=buffered,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (2, "error: no such model\n")


@pytest.mark.parametrize(
    ("words", "learning_rate", "is_demo"),
    [
        ((), 4e-4, True),
        (("run.steps=3",), 4e-4, True),
        (("model.name=mine",), 1e-5, False),
        (("run.steps=3", "tasks.source=mine.jsonl"), 1e-5, False),
    ],
)
def test_only_the_demo_has_the_demos_settings(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], learning_rate: float, is_demo: bool
) -> None:
    seen: list[PenstockConfig] = []

    def run(config: PenstockConfig, view: object) -> None:
        seen.append(config)
        raise UserError("enough")

    monkeypatch.setattr("penstock.api.run", run)
    assert call("train", *words) == 2
    assert seen[0].trainer.learning_rate == learning_rate
    assert (seen[0].eval.tasks is not None) is is_demo


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


@pytest.mark.processes
def test_a_shell_can_complete_commands() -> None:
    """What the script that `--install-completion` writes asks for when TAB is pressed after `penstock ge`."""
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock ge", "COMP_CWORD": "1"}
    code = "from penstock.cli import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **asked}
    )
    assert done.stdout.split() == ["generate"], done.stderr


def test_a_config_that_can_not_be_is_refused_without_torch_and_without_a_folder(tmp_path: Path) -> None:
    """torch and transformers take two seconds of CPU, and all else half of one."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3_5", "text_config": {}}')
    code = (
        "import sys; from penstock.cli.main import main\n"
        "try: main(['train', 'model.name=model', 'engine.kind=vllm'])\n"
        "finally: print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parent.parent)}
    refused = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "error: Qwen3_5ForCausalLM can't be served: not all of its layers are plain"
    )
    assert refused.stdout.splitlines()[-1] == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
