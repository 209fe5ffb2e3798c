"""What every `EpisodeRunner` does, wherever its workflows run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import astuple, replace

from penstock.engines.scripted import ScriptedEngine
from penstock.errors import PenstockError
from penstock.records import Chunk, Episode, GenerateRequest, SamplingParams, Task
from penstock.rollout.episode_runner import EpisodeRunner
from penstock.rollout.episode_spec import EpisodeSpec

WORKFLOWS = "tests.rollout.workflows"
SEVEN, END = 8, 0
"""Ids of the tiny model's tokenizer."""


def spec_of(
    workflow: str | None = None, *, index: int = 0, timeout_s: float = 60.0, **columns: Any
) -> EpisodeSpec:
    path = None if workflow is None else f"{WORKFLOWS}:{workflow}"
    task = Task(id="t", prompt="2+2=", columns=columns, workflow=path)
    return EpisodeSpec(
        group=12, index=index, task=task, sampling=SamplingParams(max_tokens=8, seed=3), timeout_s=timeout_s
    )


def sevens(**arguments: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda request: [SEVEN, END], max_context=64, **arguments)


class BrokenEngine(ScriptedEngine):
    """Its machine is on fire."""

    def __init__(self) -> None:
        super().__init__(lambda request: [SEVEN])

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        raise PenstockError("the engine is broken")
        yield


class EpisodeRunnerContract:
    """A subclass gives `runner`: an open runner over an engine, with the tokenizer of `model`."""

    def runner(self, engine: ScriptedEngine, model: Path) -> AbstractAsyncContextManager[EpisodeRunner]:
        raise NotImplementedError

    def run(self, model: Path, *specs: EpisodeSpec, engine: ScriptedEngine | None = None) -> list[Episode]:
        async def main() -> list[Episode]:
            async with self.runner(engine or sevens(), model) as runner:
                return list(await asyncio.gather(*(runner.run(spec) for spec in specs)))

        return asyncio.run(main())

    def test_without_a_workflow_the_prompt_is_answered_once(self, tiny_model: Path) -> None:
        (episode,) = self.run(tiny_model, spec_of(index=3))
        assert (episode.task_id, episode.index, episode.failure, episode.text) == ("t", 3, None, "7")
        assert [turn.id for turn in episode.turns] == ["g12.3.0"]

    def test_a_second_turn_continues_the_first_to_the_token(self, tiny_model: Path) -> None:
        (episode,) = self.run(tiny_model, spec_of("twice"))
        first, second = episode.turns
        assert second.prompt_ids.tolist() == [3, 11, 3, 12, SEVEN, END, 11, 2, 12]
        assert (first.id, first.parent, second.id, second.parent) == ("g12.0.0", None, "g12.0.1", "g12.0.0")
        (sample,) = episode.samples()
        assert [(span.start, span.end) for span in sample.turns] == [(4, 6), (9, 11)]

    def test_turns_have_seeds_of_their_own_that_come_again(self, tiny_model: Path) -> None:
        episodes = self.run(tiny_model, spec_of("twice"), spec_of("twice", index=1))
        episodes += self.run(tiny_model, spec_of("twice"))
        seeds = [[turn.sampling.seed for turn in episode.turns] for episode in episodes]
        assert seeds[0] == seeds[2]
        assert len({*seeds[0], *seeds[1]}) == 4

    def test_a_workflow_that_raises_is_a_failed_episode_with_its_turns(self, tiny_model: Path) -> None:
        (episode,) = self.run(tiny_model, spec_of("broken"))
        assert episode.failure == "workflow_error"
        assert episode.message.startswith("ZeroDivisionError: by nothing (workflows.py:")
        assert episode.num_output_tokens == 2
        assert episode.samples() == ()

    def test_a_workflow_that_could_not_reach_something_may_be_run_again_with_its_turns(
        self, tiny_model: Path
    ) -> None:
        engine = sevens()
        (episode,) = self.run(tiny_model, spec_of("unreachable"), engine=engine)
        assert (episode.failure, len(episode.turns)) == ("workflow_unavailable", 1)
        assert episode.message.startswith("ConnectionRefusedError: no sandbox (workflows.py:")
        again = replace(spec_of("twice"), turns=episode.turns)
        (episode,) = self.run(tiny_model, again, engine=engine)
        assert [turn.id for turn in episode.turns] == ["g12.0.0", "g12.0.1"]
        assert [request.id for request in engine.requests] == ["g12.0.0", "g12.0.1"]

    @pytest.mark.parametrize(
        ("workflow", "message"),
        [
            ("exits", "SystemExit: 3"),
            (
                "odd",
                "TypeError: a workflow must return an Episode, a Turn, a reward (a number or a Score) or None, got str",
            ),
            ("silent", "ValueError: the workflow ended without a turn; it must generate at least one"),
        ],
    )
    def test_what_is_no_episode_is_a_failed_one(self, tiny_model: Path, workflow: str, message: str) -> None:
        (episode,) = self.run(tiny_model, spec_of(workflow))
        assert episode.failure == "workflow_error"
        assert episode.message.startswith(message)

    def test_a_number_is_what_the_episode_is_worth(self, tiny_model: Path) -> None:
        (episode,) = self.run(tiny_model, spec_of("worth"))
        assert (episode.failure, episode.reward, len(episode.turns)) == (None, 0.5, 1)

    def test_a_score_keeps_its_steps_and_columns(self, tiny_model: Path) -> None:
        (episode,) = self.run(tiny_model, spec_of("valued"))
        assert (episode.failure, episode.reward, episode.parts) == (None, 0.5, {"style": 1.0})
        assert [astuple(step) for step in episode.steps] == [(1, 0, 2, 0.5)]
        (column,) = episode.columns
        assert (column.turn, column.name, column.values.dtype) == (0, "teacher", np.float32)
        assert column.values.tolist() == [-1.0, -2.0]

    def test_an_episode_ends_at_its_limit_of_turns_or_tokens_and_is_worth_nothing(
        self, tiny_model: Path
    ) -> None:
        of_turns, of_tokens = self.run(
            tiny_model,
            replace(spec_of("endless_turns"), max_turns=3),
            replace(spec_of("endless_turns", index=1), max_tokens=5),
        )
        assert (of_turns.failure, of_turns.reward, len(of_turns.turns)) == (None, 0.0, 3)
        assert (of_tokens.failure, of_tokens.reward) == (None, 0.0)
        assert [len(turn.output_ids) for turn in of_tokens.turns] == [2, 2, 1]

    def test_an_episode_past_its_time_has_failed_and_others_have_not(self, tiny_model: Path) -> None:
        late, well = self.run(tiny_model, spec_of("endless", timeout_s=1.0), spec_of("twice", index=1))
        assert (late.failure, well.failure) == ("timeout", None)
        assert late.message == "the episode took longer than rollout.timeout_s=1"

    def test_a_refused_turn_is_a_failed_episode(self, tiny_model: Path) -> None:
        (episode,) = self.run(tiny_model, spec_of("too_long"))
        assert episode.failure == "refused"
        assert "its prompt must have 1..63 tokens" in episode.message

    @pytest.mark.parametrize("workflow", [None, "hides_errors"])
    def test_an_engine_that_breaks_is_no_episodes_fault(self, tiny_model: Path, workflow: str | None) -> None:
        with pytest.raises(PenstockError, match="the engine is broken"):
            self.run(tiny_model, spec_of(workflow), engine=BrokenEngine())
