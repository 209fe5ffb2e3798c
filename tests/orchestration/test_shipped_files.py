"""Files of the user's parts reach other machines, wherever they lie."""

from pathlib import Path
from typing import Any, cast

import pytest

from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.shipped_files import files_of_run
from penstock.types import Task

PARTS = ("loss", "advantage", "correction", "kl", "selection", "reward", "workflow", "transport", "task")


def test_the_file_of_every_part_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    at = {name: tmp_path / name / f"{name}.py" for name in PARTS}
    for file in (home / "here.py", *at.values()):
        file.parent.mkdir()
        file.touch()
    monkeypatch.chdir(home)
    path = {name: f"{file}:part" for name, file in at.items()}
    config = PenstockConfig.model_validate(
        {
            "algorithm": {
                "loss": path["loss"],
                "advantage": path["advantage"],
                "corrections": {path["correction"]: {}, "here.py:part": {}, "some.module:part": {}},
                "kl_estimator": path["kl"],
                "selection": {path["selection"]: {}},
            },
            "reward": {"functions": [path["reward"], "exact_match"]},
            "rollout": {"workflow": path["workflow"]},
            "sync": {"transport": path["transport"]},
        }
    )
    prepared = Prepared(
        config=config,
        model="a/hub-name",
        tokenizer=cast(Any, None),
        tasks=[Task(id="t", prompt="p", workflow=path["task"])],
        heldout=[],
        folder=tmp_path / "runs",
        max_context=64,
    )
    shipped = {file for _, files in files_of_run(prepared, home).roots for file in files}
    assert shipped == {home / "here.py", *at.values()}
