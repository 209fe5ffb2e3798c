"""Workflows in real processes: turns come from the controller's engine, and what hangs or dies is replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.config.loader import build
from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.orchestration.config import PenstockConfig
from penstock.orchestration.launchers.local import LocalLauncher
from penstock.orchestration.preflight import Prepared
from penstock.orchestration.rollout_workers import start_episodes
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.rollout.workflow import load_workflow
from penstock.types import Episode
from tests.rollout.contract import sevens, spec_of


@asynccontextmanager
async def pool(engine: ScriptedEngine, model: Path, folder: Path) -> AsyncIterator[EpisodeRunner]:
    """One process, started as a run with a workflow starts it."""
    config = build(PenstockConfig, {"rollout": {"workers": 1, "workflow": "tests.rollout.workflows:twice"}})
    prepared = Prepared(
        config=config,
        model=str(model),
        tokenizer=ChatTokenizer(str(model)),
        tasks=[],
        heldout=[],
        folder=folder,
        max_context=64,
        workflow=load_workflow("tests.rollout.workflows:twice"),
    )
    async with LocalLauncher(folder) as launcher:
        yield await start_episodes(launcher, prepared, engine)


def test_a_tool_that_blocks_stops_neither_its_neighbours_nor_the_controller(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One process, two episodes: the second runs from start to end while the first holds its thread."""
    began, until = tmp_path / "began", tmp_path / "until"

    async def main() -> list[Episode]:
        async with pool(sevens(), tiny_model, tmp_path) as episodes:
            blocked = asyncio.create_task(episodes.run(spec_of("blocks", began=str(began), until=str(until))))
            other = await episodes.run(spec_of("twice", index=1))
            assert not blocked.done()
            await asyncio.to_thread(until.touch)
            return [await blocked, other]

    episodes = asyncio.run(main())
    assert [episode.failure for episode in episodes] == [None, None]
    assert [len(episode.turns) for episode in episodes] == [1, 2]


def test_what_hangs_or_dies_costs_its_episode_and_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    async def main() -> list[Episode]:
        async with pool(sevens(), tiny_model, tmp_path) as episodes:
            hangs = spec_of("blocks", timeout_s=1.0, began=str(tmp_path / "b"), until=str(tmp_path / "never"))
            dies = spec_of("dies_once", mark=str(tmp_path / "mark"))
            return [await episodes.run(spec) for spec in (hangs, spec_of("twice"), dies, dies)]

    hung, well, died, again = asyncio.run(main())
    assert [episode.failure for episode in (hung, well, died, again)] == [
        "timeout",
        None,
        "worker_died",
        None,
    ]
    assert hung.message == "the episode blocks, 1 s (rollout.timeout_s) are over"
    assert len(hung.turns) == 1
    assert "worker rollout0" in died.message and "exit code 7" in died.message
