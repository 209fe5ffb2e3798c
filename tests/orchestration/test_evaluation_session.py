"""Engines that lack what an evaluation asks for."""

from pathlib import Path

import pytest

from penstock.config.loader import build
from penstock.errors import UserError
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.evaluation_session import prepare_evaluation


def test_what_an_engine_lacks_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    kind = "tests.engines.scripted_kind:SCRIPTED"
    sections = {"model": {"name": "nowhere"}, "engine": {"kind": kind}}
    config = build(PenstockConfig, {**sections, "eval": {"tasks": {}, "temperature": 0}})
    with pytest.raises(UserError) as raised:
        prepare_evaluation(config, folder=tmp_path, log=print, cache=tmp_path, gpus=())
    assert str(raised.value) == (
        f"engine.kind={kind} lacks seed (for run.seed=0), greedy (for eval.temperature=0); change the setting, or "
        "choose another engine.kind"
    )
    assert list(tmp_path.iterdir()) == []
