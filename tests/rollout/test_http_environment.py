"""An environment by URL: a game of several turns, and one that answers nonsense."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import Episode
from penstock.rollout.episode_runner import LocalEpisodes
from penstock.rollout.workflow import load_workflow
from tests.rollout.contract import END, spec_of
from tests.services import Answer, service


def play(answer: Answer, model: Path, **limits: int) -> Episode:
    tokenizer = ChatTokenizer(str(model))
    said = iter(["5", "6", "7"])

    async def main() -> Episode:
        engine = ScriptedEngine(lambda request: [*tokenizer.encode(next(said)), END])
        async with service(answer) as url:
            spec = msgspec.structs.replace(spec_of(index=2, answer="7"), **limits)
            return await LocalEpisodes(engine, tokenizer, load_workflow(url)).run(spec)

    return asyncio.run(main())


def test_a_game_of_three_turns_is_one_sample_and_its_rewards_add_up(tiny_model: Path) -> None:
    asked = []

    async def answer(path: str, body: Any) -> Any:
        asked.append((path, body))
        if path == "/reset":
            return {"observation": body["task"]["prompt"] + "0"}
        done = body["action"] == "7"
        return {"observation": "+1=", "reward": 0.25, "done": done}

    episode = play(answer, tiny_model)
    assert (episode.failure, episode.reward) == (None, 0.75)
    assert [turn.text for turn in episode.turns] == ["5", "6", "7"]
    (sample,) = episode.samples()
    tokenizer = ChatTokenizer(str(tiny_model))
    assert tokenizer.decode(sample.token_ids.tolist()) == "2+2=05+1=6+1=7"
    assert tokenizer.decode(sample.token_ids[sample.loss_mask].tolist()) == "567"
    assert asked[0] == ("/reset", {"episode": "g12.2", "task": {"id": "t", "prompt": "2+2=", "answer": "7"}})
    assert asked[-1] == ("/step", {"episode": "g12.2", "turn": 2, "action": "7"})


@pytest.mark.parametrize(
    ("limits", "num_turns", "reward"), [({"max_turns": 2}, 2, 0.5), ({"max_tokens": 4}, 2, 0.5)]
)
def test_a_game_that_is_cut_short_keeps_the_rewards_of_its_steps(
    tiny_model: Path, limits: dict[str, int], num_turns: int, reward: float
) -> None:
    async def answer(path: str, body: Any) -> Any:
        return {"observation": "+1=", "reward": 0.25, "done": False}

    episode = play(answer, tiny_model, **limits)
    assert (episode.failure, len(episode.turns), episode.reward) == (None, num_turns, reward)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/reset": [], "/step": {}}, "/reset must answer an object"),
        ({"/reset": {}, "/step": {"reward": 1}}, "/step must answer an object with an observation, or done"),
        (
            {"/reset": {}, "/step": {"reward": "1", "done": True}},
            "the reward of a step must be a number, got '1'",
        ),
    ],
)
def test_one_that_answers_nonsense_is_a_failed_episode(
    tiny_model: Path, answers: dict[str, Any], said: str
) -> None:
    async def answer(path: str, body: Any) -> Any:
        return answers[path]

    episode = play(answer, tiny_model)
    assert episode.failure == "workflow_error"
    assert said in episode.message
