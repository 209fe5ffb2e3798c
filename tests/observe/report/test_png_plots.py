import sys
from pathlib import Path

import pytest

from benchmarks.made_run import write_made_run
from penstock.errors import MissingExtraError
from penstock.observe.report.png_plots import write_pngs
from tests.observe.store.written import read


def test_every_plot_is_a_picture(tmp_path: Path) -> None:
    run = read(write_made_run(tmp_path / "made", steps=40))
    paths = write_pngs(run)
    assert {path.name for path in paths} >= {"reward.png", "staleness.png", "time.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read(write_made_run(tmp_path / "made", steps=2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[plots\]"):
        write_pngs(run)
