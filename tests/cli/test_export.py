import os
from pathlib import Path

import pytest

from penstock.cli.export import export_model, model_of
from penstock.cli.main import main
from penstock.errors import UserError


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


def test_a_checkpoint_that_a_resumed_run_has_reached_is_newer_than_the_old_end(run: Path) -> None:
    os.utime(run / "checkpoints" / "step-4" / "model" / "config.json", (9, 9))
    assert model_of(run) == run / "checkpoints" / "step-4" / "model"


def test_what_is_not_there_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 3; it has checkpoints of steps: 2, 4"):
        model_of(run, 3)
    with pytest.raises(UserError, match="has no model yet"):
        model_of(tmp_path)


def test_nothing_is_overwritten(run: Path) -> None:
    Path("run").mkdir()
    with pytest.raises(UserError, match="run exists already; name another folder with --to"):
        export_model(run, step=None, to=None)
