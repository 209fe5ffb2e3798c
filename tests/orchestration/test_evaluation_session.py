"""Engines that lack what an evaluation asks for."""

import asyncio
from pathlib import Path

import pytest

from penstock.config.loader import build
from penstock.engines.scripted import ScriptedEngine
from penstock.errors import UserError
from penstock.models.tokenizer import ChatTokenizer
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.evaluation_session import evaluate_on
from penstock.orchestration.launchers.local import LocalLauncher
from penstock.orchestration.preflight import Prepared
from penstock.types import Task


def test_what_an_engine_lacks_is_refused_before_anything_is_generated(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine = ScriptedEngine(lambda request: [0])
    prepared = Prepared(
        config=build(PenstockConfig, {"eval": {"tasks": {}, "temperature": 0}}),
        model=str(tiny_model),
        tokenizer=ChatTokenizer(str(tiny_model)),
        tasks=[],
        heldout=[Task(id="a", prompt="1+1=")],
        folder=tmp_path,
        max_context=64,
    )

    async def main() -> None:
        async with LocalLauncher(tmp_path) as launcher:
            await evaluate_on(launcher, prepared, {"engine0": engine})

    with pytest.raises(UserError) as raised:
        asyncio.run(main())
    assert str(raised.value) == (
        f"engine {engine.name} lacks seed (for run.seed=0), greedy (for eval.temperature=0); change the setting, or "
        "choose another engine.kind"
    )
    assert engine.requests == []
