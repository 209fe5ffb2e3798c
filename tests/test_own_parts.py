"""Runs with parts of a user's own, as the docs show them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from penstock.errors import UserError
from penstock.observe import readers
from penstock.observe.reading.run_reading import RunReading
from penstock.page.chart_answers import list_metrics
from tests.cli.commands import call

DOCS = Path(__file__).parent.parent / "docs"
TASKS = "".join(f'{{"prompt": "{a}+5=", "answer": "{a + 5}"}}\n' for a in range(40))
SMALL = {"max_new_tokens": 4, "groups_per_step": 2, "group_size": 4}


def blocks(page: str, section: str, language: str) -> list[str]:
    text = (DOCS / page).read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with the files of docs/algorithms.md, and a config that names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    (code,), (config,) = (
        blocks("algorithms.md", "Your own", "python"),
        blocks("algorithms.md", "Your own", "yaml"),
    )
    (tmp_path / "mine.py").write_text(code)
    return {
        **yaml.safe_load(config),
        "model": {"name": str(tiny_model)},
        "tasks": {"source": "tasks.jsonl"},
        "reward": {"functions": "exact_match"},
        "rollout": SMALL,
        "run": {"steps": 3},
    }


def metrics() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]


def test_algorithms_of_ones_own_train_as_the_docs_show_them(
    project: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loss reports is in `metrics.jsonl`, in the terminal, and among the curves of the page."""
    monkeypatch.setattr(readers, "DRAW_EVERY_S", 0.0)  # these steps are quicker than the view
    Path("config.yaml").write_text(yaml.safe_dump(project))
    words = ["trainer.parallel.data=2", "run.checkpoint_every=1", "observe.every_s=0.001"]
    assert call("train", "config.yaml", *words) == 0
    assert re.search(r"step [123]/3 .*  my_weight [01][.\d]*  ", capsys.readouterr().out)
    reading = RunReading(Path("runs/run"))
    reading.refresh()
    written = next(row["my_weight"] for row in reversed(metrics()) if "my_weight" in row)
    assert list_metrics(reading)["values"]["my_weight"] == pytest.approx(written)
    assert reading.state.own_metrics.keys() == {"clip_fraction", "my_weight"}
    weights = [row["my_weight"] for row in metrics() if "my_weight" in row]
    assert len(weights) == 3
    assert all(0 < weight <= 1 for weight in weights)
    assert call("resume", "run", "run.steps=4") == 0
    assert [row["step"] for row in metrics() if "my_weight" in row] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (
            "algorithm.loss_args={strenght: 1}",
            "unknown parameter 'strenght' of loss 'mine.py:my_loss'; did you mean",
        ),
        (
            "algorithm.loss_args={strength: -1}",
            "strength of loss 'mine.py:my_loss' must be > 0, got -1",
        ),
        ("algorithm.loss=mine.py:absent", "the loss 'mine.py:absent': mine.py has no function 'absent'"),
        ("algorithm.loss=absent.py:loss", "the loss file absent.py does not exist in the current folder"),
        ("algorithm.advantage=mine.py:my_correction", None),
    ],
)
def test_what_is_wrong_with_them_is_a_sentence(
    project: dict[str, Any], word: str, sentence: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts where the signature shows it, from the trainer where only a step does."""
    Path("config.yaml").write_text(yaml.safe_dump(project))
    assert call("train", "config.yaml", word) == 2
    error = capsys.readouterr().err
    if sentence is None:
        assert "the advantage 'mine.py:my_correction' failed: AttributeError: " in error
        assert "(mine.py, line " in error
    else:
        assert sentence in error
        assert not Path("runs").exists()
    assert error.startswith("error: ") and error.count("\n") == 1


def top_level_loss(tokens: Any) -> Any:
    return -tokens.log_ratio().exp() * tokens.advantages


def test_a_function_of_a_module_is_named_by_its_path(project: dict[str, Any]) -> None:
    summary = penstock.train({**project, "algorithm": {}}, algorithm={"loss": top_level_loss}, steps=1)
    assert summary.steps == 1
    assert "tests.test_own_parts:top_level_loss" in Path("runs/run/config.yaml").read_text()


def test_a_lambda_has_no_path(project: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match="algorithm.loss: <function .*> can't be imported by a worker process"
    ):
        penstock.train({**project, "algorithm": {}}, algorithm={"loss": lambda tokens: -tokens.logprobs})


TRANSPORT = """
from penstock.sync.filesystem import FilesystemPublisher, FilesystemReceiver
from penstock.sync.transports import Transport

PIGEON = Transport(needs="a loft", publisher=FilesystemPublisher, publisher_takes=("folder",),
                   receiver=FilesystemReceiver, staged_copies=1)
"""


LAUNCHER = """
from contextlib import asynccontextmanager
from penstock.config import Section
from penstock.processes.launchers.launcher_kinds import LauncherKind
from penstock.processes.launchers.local import open_local

class Settings(Section):
    motto: str = ""

@asynccontextmanager
async def open_mine(parts):
    parts.log(parts.settings.motto)
    async with open_local(parts) as launcher:
        yield launcher

MINE = LauncherKind(opener=open_mine, settings=Settings, on_this_machine=True)
"""


def own_engine() -> str:
    """Write the engine of docs/api.md, and give the config that names it."""
    code, config = (blocks("api.md", "Parts of your own", language)[0] for language in ("python", "yaml"))
    Path("mine.py").write_text(code)
    return config


def test_an_engine_a_transport_and_a_launcher_of_ones_own_serve_a_run(
    project: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = own_engine()
    Path("pigeons.py").write_text(TRANSPORT)
    Path("places.py").write_text(LAUNCHER)
    own = {**project, **yaml.safe_load(config), "algorithm": {}, "sync": {"transport": "pigeons.py:PIGEON"}}
    own["launcher"] = {"kind": "places.py:MINE", "settings": {"motto": "workers go where I say"}}
    Path("config.yaml").write_text(yaml.safe_dump(own))
    assert call("train", "config.yaml", "rollout.max_new_tokens=8") == 0
    assert "workers go where I say" in capsys.readouterr().out
    rows = [row for row in metrics() if "answer_tokens_max" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["answer_tokens_max"] for row in rows) == 3


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("engine.settings={mine.py:SHORT: {longer: 3}}", "unknown key 'longer' in Settings; did you mean"),
        (
            "engine.kind=mine.py:Settings",
            "the engine kind 'mine.py:Settings' must be a penstock.engines.kinds.",
        ),
        ("engine.kind=mime.py:SHORT", "the engine kind file mime.py does not exist in the current folder"),
        ("launcher=mine.py:SHORT", "the launcher kind 'mine.py:SHORT' must be a penstock.processes."),
        ("launcher.settings={motto: x}", "unknown key 'motto' in NoSettings"),
        ("sync.transport=mine.py:SHORT", "the transport 'mine.py:SHORT' must be a penstock.sync.transports."),
    ],
)
def test_a_wrong_part_is_refused_before_anything_starts(
    project: dict[str, Any], word: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = yaml.safe_load(own_engine())
    if word.startswith("engine.kind="):
        own["engine"].pop("settings", None)  # they are of the kind that is not used then
    Path("config.yaml").write_text(yaml.safe_dump({**project, **own, "algorithm": {}}))
    assert call("train", "config.yaml", word) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("error: ") and error.count("\n") == 1
    assert not Path("runs").exists()
