"""Episodes on the caller's event loop, and what a workflow may return."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Episode, Score, StepScore, Task
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_runner import EpisodeRunner, LocalEpisodes, run_episode
from penstock.rollout.workflow import as_workflow
from tests.rollout.contract import EpisodeRunnerContract, sevens, spec_of


class TestLocalEpisodes(EpisodeRunnerContract):
    @asynccontextmanager
    async def runner(self, engine: ScriptedEngine, model: Path) -> AsyncIterator[EpisodeRunner]:
        yield LocalEpisodes(engine, ChatTokenizer(str(model)))


def run(model: Path, function: Any) -> Episode:
    async def main() -> Episode:
        return await run_episode(
            as_workflow(function), Rollout(spec_of(index=2), sevens(), ChatTokenizer(str(model)))
        )

    return asyncio.run(main())


def test_a_returned_turn_stands_for_the_path_to_it(tiny_model: Path) -> None:
    async def best_of_two(task: Task, rollout: Rollout) -> Any:
        first = await rollout.generate(task.prompt)
        await rollout.generate(rollout.continue_(first, "1"))
        return await rollout.generate(rollout.continue_(first, "2"))

    assert [turn.id for turn in run(tiny_model, best_of_two).turns] == ["g12.2.0", "g12.2.2"]


def test_nothing_stands_for_all_turns_in_the_order_of_asking(tiny_model: Path) -> None:
    async def both(task: Task, rollout: Rollout) -> None:
        await asyncio.gather(rollout.generate("1"), rollout.generate("2"))

    episode = run(tiny_model, both)
    assert [(turn.id, turn.prompt_ids.tolist()) for turn in episode.turns] == [
        ("g12.2.0", [2]),
        ("g12.2.1", [3]),
    ]


def test_a_returned_episode_gets_its_place_and_may_call_itself_failed(tiny_model: Path) -> None:
    async def gives_up(task: Task, rollout: Rollout) -> Episode:
        turn = await rollout.generate(task.prompt)
        return Episode(task_id=task.id, turns=(turn,), failure="sandbox_lost", message="no container")

    episode = run(tiny_model, gives_up)
    assert (episode.index, episode.failure, episode.message) == (2, "sandbox_lost", "no container")


def test_rewrites_are_told_of_episodes_that_fail_and_that_are_returned_whole(tiny_model: Path) -> None:
    async def failing(task: Task, rollout: Rollout) -> Any:
        rollout.note_rewrite("client")
        raise ValueError("no more")

    async def returning(task: Task, rollout: Rollout) -> Any:
        rollout.note_rewrite("template")
        return Episode(task_id="t", turns=(await rollout.generate(task.prompt),))

    failed, whole = run(tiny_model, failing), run(tiny_model, returning)
    assert (failed.failure, failed.rewrites) == ("workflow_error", {"client": 1})
    assert (whole.failure, whole.rewrites) == (None, {"template": 1})


def test_a_step_of_tokens_that_are_not_there_fails_the_episode(tiny_model: Path) -> None:
    async def astray(task: Task, rollout: Rollout) -> Score:
        await rollout.generate(task.prompt)
        return Score(value=1.0, steps=(StepScore(turn=0, start=0, end=9, value=1.0),))

    episode = run(tiny_model, astray)
    assert episode.failure == "workflow_error"
    assert "the workflow returned a step of tokens 0..9 of turn 0, which has 2" in episode.message


def test_a_workflow_that_cancels_itself_has_failed(tiny_model: Path) -> None:
    async def quits(task: Task, rollout: Rollout) -> None:
        raise asyncio.CancelledError

    assert run(tiny_model, quits).message == "the workflow cancelled itself"


def test_cancelling_an_episode_is_no_failure(tiny_model: Path) -> None:
    async def main() -> None:
        began = asyncio.Event()

        async def waits(task: Task, rollout: Rollout) -> None:
            began.set()
            await asyncio.Event().wait()

        rollout = Rollout(spec_of(), sevens(), ChatTokenizer(str(tiny_model)))
        episode = asyncio.create_task(run_episode(as_workflow(waits), rollout))
        await began.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode

    asyncio.run(main())


def test_turns_that_a_workflow_leaves_behind_end_with_it(tiny_model: Path) -> None:
    """A fork that nobody waits for must not keep an engine busy."""

    async def main() -> tuple[int, bool, Episode]:
        left: list[asyncio.Task[Any]] = []
        generating = asyncio.Event()

        async def forgets(task: Task, rollout: Rollout) -> None:
            await rollout.generate("1")
            left.append(asyncio.create_task(rollout.generate("2")))
            await generating.wait()

        async def token(seconds: float) -> None:
            if len(engine.requests) > 1:
                generating.set()
                await asyncio.Event().wait()

        engine = sevens(sleep=token)
        rollout = Rollout(spec_of(), engine, ChatTokenizer(str(tiny_model)))
        episode = await run_episode(as_workflow(forgets), rollout)
        await asyncio.gather(*left, return_exceptions=True)
        with pytest.raises(RuntimeError, match=r"episode g12\.0 is over"):
            await rollout.generate("3")
        return (await engine.report()).num_running, left[0].cancelled(), episode

    running, cancelled, episode = asyncio.run(main())
    assert (running, cancelled, len(episode.turns)) == (0, True, 1)
