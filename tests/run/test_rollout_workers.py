"""Workflows in real processes: turns come from the controller's engine, and what hangs or dies is replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.config.loader import build
from penstock.config.root import PenstockConfig
from penstock.durability.work_replay import WorkReplay
from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.processes.launchers.local import LocalLauncher
from penstock.records import CallAnswer, Episode, Task
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.rollout.replayed_calls import KeepCall, keep_nothing
from penstock.rollout.workflow import load_workflow
from penstock.run.preflight import Prepared
from penstock.run.rollout_workers import retry_words, start_episodes
from tests.rollout.contract import sevens, spec_of
from tests.services import service

pytestmark = pytest.mark.processes


@asynccontextmanager
async def pool(
    engine: ScriptedEngine, model: Path, folder: Path, keep_call: KeepCall = keep_nothing
) -> AsyncIterator[EpisodeRunner]:
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
        episodes = await start_episodes(launcher, prepared, WorkReplay(engine=engine, keep_call=keep_call))
        try:
            yield episodes
        finally:
            await episodes.close()


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


def test_clients_that_a_framework_keeps_by_address_fail_no_episode(tiny_model: Path, tmp_path: Path) -> None:
    """Episodes have event loops of their own, and such a client belongs to the loop that it was first used in."""

    async def main() -> list[Episode]:
        async with pool(sevens(), tiny_model, tmp_path) as episodes:
            specs = [spec_of("keeps_its_client", index=index) for index in range(64)]
            first = await asyncio.gather(*(episodes.run(spec) for spec in specs[:32]))
            return first + await asyncio.gather(*(episodes.run(spec) for spec in specs[32:]))

    episodes = asyncio.run(main())
    assert [(episode.failure, episode.message, len(episode.turns)) for episode in episodes] == [
        (None, "", 1)
    ] * 64


@pytest.mark.full
def test_what_hangs_or_dies_costs_its_episode_and_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    paths = {"began": str(tmp_path / "began"), "until": str(tmp_path / "never")}

    async def hang(episodes: EpisodeRunner) -> tuple[float, Episode]:
        """With as much time as its first turn takes where the machine is busy."""
        for timeout_s in (1.0, 4.0, 16.0):
            episode = await episodes.run(spec_of("blocks", timeout_s=timeout_s, **paths))
            if (tmp_path / "began").exists():
                break
        return timeout_s, episode

    async def main() -> tuple[tuple[float, Episode], list[Episode]]:
        async with pool(sevens(), tiny_model, tmp_path) as episodes:
            hung = await hang(episodes)
            once = spec_of("dies_once", mark=str(tmp_path / "mark"))
            always = spec_of("dies_always")
            return hung, [await episodes.run(spec) for spec in (spec_of("twice"), once, always)]

    (timeout_s, hung), (well, again, died) = asyncio.run(main())
    assert [episode.failure for episode in (hung, well, again, died)] == [
        "timeout",
        None,
        None,
        "worker_died",
    ]
    assert hung.message == f"the episode blocks, {timeout_s:g} s (rollout.timeout_s) are over"
    assert len(hung.turns) == 1
    assert "worker rollout0" in died.message and "exit code 7" in died.message


def test_what_calls_through_the_rollout_gave_is_told_and_not_asked_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    kept: list[CallAnswer] = []
    file = tmp_path / "lines"

    async def keep(answer: CallAnswer) -> None:
        kept.append(answer)

    async def main() -> list[Episode]:
        async with pool(sevens(), tiny_model, tmp_path, keep) as episodes:
            spec = spec_of("calls", file=str(file))
            first = await episodes.run(spec)
            return [first, await episodes.run(msgspec.structs.replace(spec, calls=tuple(kept)))]

    first, again = asyncio.run(main())
    assert [(call.group, call.episode, call.call, call.answer) for call in kept] == [
        (12, 0, 0, b'{"lines":1}')
    ]
    assert file.read_text() == "g12.0\n"
    assert first.failure is again.failure is None
    assert again.turns[0].prompt_ids.tolist() == first.turns[0].prompt_ids.tolist()


CURL = """#!/bin/sh
# An agent in a shell: one question, and a reward for itself.
answer=$(curl -sf "$OPENAI_BASE_URL/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" -d '{"model": "policy", "prompt": "2+2="}')
case "$answer" in *'"text":"7"'*) reward=0.75 ;; *) reward=0 ;; esac
curl -sf "$PENSTOCK_EPISODE_URL/reward" -H "content-type: application/json" -d "{\\"reward\\": $reward}" > /dev/null
"""


def test_a_shell_script_is_an_agent_in_a_process_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    """The run's workflow stays what it is: the task names the command."""
    script = tmp_path / "agent.sh"
    script.write_text(CURL)
    dying = tmp_path / "dying.sh"
    dying.write_text("exit 3\n")

    async def main() -> list[Episode]:
        async with pool(sevens(), tiny_model, tmp_path) as episodes:
            specs = [
                msgspec.structs.replace(
                    spec_of(index=index), task=Task(id="t", prompt="2+2=", workflow=f"sh {path}")
                )
                for index, path in enumerate((script, dying, script))
            ]
            return list(await asyncio.gather(*(episodes.run(spec) for spec in specs)))

    one, dead, other = asyncio.run(main())
    assert [episode.failure for episode in (one, dead, other)] == [None, "workflow_error", None]
    assert dead.message.startswith("AgentFailed: sh ended with exit code 3")
    for episode in (one, other):
        assert (episode.reward, episode.text) == (0.75, "7")
        assert episode.turns[0].prompt_ids.tolist() == [3, 11, 3, 12]


FIRST_FAILS = """#!/bin/sh
# An agent that asks, and at its first try finds nobody to tell.
curl -sf "$OPENAI_BASE_URL/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" -d '{"model": "policy", "prompt": "2+2="}' > /dev/null
test -e "$0.tried" || { touch "$0.tried"; exit 75; }
"""


def test_an_agent_that_could_not_reach_something_is_started_again_and_its_answers_stay(
    tiny_model: Path, tmp_path: Path
) -> None:
    script, engine = tmp_path / "agent.sh", sevens()
    script.write_text(FIRST_FAILS)
    script.chmod(0o700)

    async def main() -> Episode:
        async with pool(engine, tiny_model, tmp_path) as episodes:
            task = Task(id="t", prompt="2+2=", workflow=str(script))
            return await episodes.run(msgspec.structs.replace(spec_of(), task=task))

    episode = asyncio.run(main())
    assert (episode.failure, [turn.text for turn in episode.turns]) == (None, ["7"])
    assert [request.id for request in engine.requests] == ["g12.0.0"]


def test_without_workers_the_service_of_a_task_is_asked_as_the_config_says(
    tiny_model: Path, tmp_path: Path
) -> None:
    asked: list[str] = []
    http = {"retries": 2, "retry_s": 0.001}
    config = build(PenstockConfig, {"rollout": {"workers": 0, "retries": 0, "http": http}})

    async def unwell(path: str, body: Any) -> web.Response:
        asked.append(path)
        return web.Response(status=503)

    async def main() -> Episode:
        async with LocalLauncher(tmp_path) as launcher, service(unwell) as url:
            task = Task(id="t", prompt="2+2=", workflow=url)
            prepared = Prepared(
                config=config,
                model=str(tiny_model),
                tokenizer=ChatTokenizer(str(tiny_model)),
                tasks=[task],
                heldout=[],
                folder=tmp_path,
                max_context=64,
            )
            episodes = await start_episodes(
                launcher, prepared, WorkReplay(engine=sevens(), keep_call=keep_nothing)
            )
            return await episodes.run(msgspec.structs.replace(spec_of(), task=task))

    assert asyncio.run(main()).failure == "workflow_error"
    assert asked == ["/reset"] * 3


def test_episodes_that_are_run_again_are_told_of_ever_more_seldom() -> None:
    episode = Episode(task_id="sum", turns=(), index=0, failure="workflow_unavailable", message="no sandbox")
    assert retry_words(episode, 1, 2.0) == (
        "an episode of task 'sum' could not reach something (no sandbox); it is run again in 2 s (rollout.retries); 1 "
        "so far"
    )
    assert [count for count in range(1, 2000) if retry_words(episode, count, 1.0)] == [1, 10, 100, 1000]
