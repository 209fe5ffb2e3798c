"""A reward by URL, from the config to the score."""

import asyncio
from typing import Any

import pytest

from penstock.errors import ScoringFailed
from penstock.records import Score
from penstock.scoring.config import RewardConfig
from penstock.scoring.functions import calls_at_once, load_functions
from penstock.scoring.reward_calls import score_episodes
from tests.scoring.groups import a_group
from tests.services import service


async def scored(url: str, *texts: str) -> tuple[Score, ...]:
    config = RewardConfig(functions=({"path": f"{url}/score"},), http={"retries": 0})
    rewards = load_functions(config)
    assert calls_at_once(rewards, 16) == 16
    group = a_group(*texts, answer="4")
    return await score_episodes(rewards, group.task, group.episodes)


def test_it_is_sent_the_task_and_the_answer_and_says_what_they_are_worth() -> None:
    seen = []

    async def answer(path: str, body: Any) -> Any:
        seen.append((path, body))
        right = float(body["completion"] == body["task"]["answer"])
        return {"reward": right, "parts": {"length": len(body["completion"])}} if right else right

    async def main() -> tuple[Score, ...]:
        async with service(answer) as url:
            return await scored(url, "4", "five")

    right, wrong = asyncio.run(main())
    assert (right.value, right.parts) == (1.0, {"service": 1.0, "service.length": 1.0})
    assert (wrong.value, wrong.parts) == (0.0, {"service": 0.0})
    path, body = min(seen, key=lambda one: len(one[1]["completion"]))
    assert path == "/score"
    assert body["turns"] == [{"text": "4", "num_tokens": body["turns"][0]["num_tokens"]}]


@pytest.mark.parametrize("said", ["much", None, True, {"reward": "1"}, {"reward": 1, "parts": {"a": None}}])
def test_what_is_no_reward_costs_the_group(said: Any) -> None:
    async def answer(path: str, body: Any) -> Any:
        return said

    async def main() -> None:
        async with service(answer) as url:
            await scored(url, "4")

    with pytest.raises(ScoringFailed, match="must answer a number"):
        asyncio.run(main())
