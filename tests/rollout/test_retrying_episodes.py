"""Episodes that come at a later try, in virtual time."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.models.tokenizer import ChatTokenizer
from penstock.planner.virtual_time import run_in_virtual_time
from penstock.records import CallAnswer, Episode, Task, Turn
from penstock.rollout.episode_rollout import Rollout
from penstock.rollout.episode_runner import LocalEpisodes
from penstock.rollout.retrying_episodes import CallsSoFar, RetryingEpisodes
from penstock.rollout.workflow import as_workflow
from tests.rollout.contract import sevens, spec_of


class Sandbox:
    """A workflow of two turns with a tool between them, and errors after the first turn."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_runs = self.num_calls = 0
        self.shown: list[int] = []
        """Tokens of the first turn, as they come at each try."""

    def tool(self, text: str) -> str:
        self.num_calls += 1
        return f"+{len(text)}="

    async def run(self, task: Task, rollout: Rollout) -> Turn:
        self.num_runs += 1
        turn = await rollout.generate(
            task.prompt, on_chunk=lambda chunk: self.shown.append(len(chunk.token_ids))
        )
        said = await rollout.call(self.tool, turn.text)
        if self.errors:
            raise self.errors.pop(0)
        return await rollout.generate(rollout.continue_(turn, said))


class Played:
    """The episode of a workflow, what engines and the log were asked for it, and how long it took."""

    def __init__(self, model: Path, workflow: Sandbox, *, retries: int = 3) -> None:
        self.engine, self.logged, self.told = (
            sevens(),
            list[CallAnswer](),
            list[tuple[str | None, int, float]](),
        )

        async def log(answer: CallAnswer) -> None:
            self.logged.append(answer)

        async def main() -> Episode:
            calls = CallsSoFar(log)
            local = LocalEpisodes(self.engine, ChatTokenizer(str(model)), as_workflow(workflow), calls.keep)
            episodes = RetryingEpisodes(local, calls, retries=retries, report=self.tell)
            episode = await episodes.run(spec_of())
            await episodes.close()
            self.left = calls.of(spec_of())
            self.took_s = asyncio.get_running_loop().time()
            return episode

        self.episode = run_in_virtual_time(main())

    def tell(self, episode: Episode, count: int, wait_s: float) -> None:
        self.told.append((episode.failure, count, wait_s))


def test_a_workflow_is_run_again_with_growing_waits_and_makes_nothing_twice(tiny_model: Path) -> None:
    sandbox = Sandbox(ConnectionResetError("gone"), TimeoutError("late"))
    played = Played(tiny_model, sandbox)
    assert (played.episode.failure, len(played.episode.turns)) == (None, 2)
    assert (sandbox.num_runs, sandbox.num_calls, played.took_s) == (3, 1, 3.0)
    assert [request.id for request in played.engine.requests] == ["g12.0.0", "g12.0.1"]
    assert sum(sandbox.shown) == 6
    assert [answer.call for answer in played.logged] == [0]
    assert played.told == [("workflow_unavailable", 1, 1.0), ("workflow_unavailable", 2, 2.0)]
    assert played.left == ()


def test_after_the_last_try_the_reason_is_told(tiny_model: Path) -> None:
    sandbox = Sandbox(*[ConnectionResetError("gone")] * 9)
    played = Played(tiny_model, sandbox)
    assert (played.episode.failure, sandbox.num_runs, played.took_s) == ("workflow_unavailable", 4, 7.0)
    assert played.episode.message.startswith("ConnectionResetError: gone (")


@pytest.mark.parametrize("error", [ValueError("wrong"), FileNotFoundError("rules.json")])
def test_what_can_never_succeed_fails_at_once(tiny_model: Path, error: Exception) -> None:
    sandbox = Sandbox(error, error)
    played = Played(tiny_model, sandbox)
    assert (played.episode.failure, sandbox.num_runs, played.took_s) == ("workflow_error", 1, 0.0)
    assert played.told == []


def test_without_retries_nothing_is_run_again(tiny_model: Path) -> None:
    sandbox = Sandbox(ConnectionResetError("gone"))
    played = Played(tiny_model, sandbox, retries=0)
    assert (played.episode.failure, sandbox.num_runs) == ("workflow_unavailable", 1)


def test_a_workflow_that_takes_another_way_gets_fresh_turns(tiny_model: Path) -> None:
    class Wanders(Sandbox):
        async def run(self, task: Task, rollout: Rollout) -> Turn:
            self.num_runs += 1
            turn = await rollout.generate("2+" * self.num_runs)
            if self.errors:
                raise self.errors.pop(0)
            return turn

    played = Played(tiny_model, Wanders(ConnectionResetError("gone")))
    assert [turn.prompt_ids.tolist() for turn in played.episode.turns] == [[3, 11, 3, 11]]
    assert [request.id for request in played.engine.requests] == ["g12.0.0", "g12.0.0"]


def test_calls_of_an_evaluation_are_those_of_its_own_spec() -> None:
    async def main() -> tuple[CallAnswer, ...]:
        calls = CallsSoFar()
        await calls.keep(CallAnswer(group=12, episode=0, call=0, key=b"", answer=b"1"))
        return calls.of(msgspec.structs.replace(spec_of(), label="e"))

    assert asyncio.run(main()) == ()
