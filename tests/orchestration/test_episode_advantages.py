import numpy as np
import pytest

from penstock.algorithms.config import AlgorithmConfig
from penstock.orchestration.episode_advantages import episode_advantages
from penstock.types import Episode, Group, SamplingParams, Score, ScoredGroup, Task, Turn


def episode(num_tokens: int) -> Episode:
    turn = Turn(
        prompt_ids=np.array([1], np.int32),
        output_ids=np.zeros(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        finish_reason="stop",
        sampling=SamplingParams(),
        text="",
    )
    return Episode(task_id="t", turns=(turn,))


def group(*rewards: float) -> ScoredGroup:
    """Episode n has n + 1 tokens."""
    episodes = tuple(episode(index + 1) for index in range(len(rewards)))
    return ScoredGroup(
        group=Group(number=0, task=Task(id="t", prompt="p"), episodes=episodes),
        scores=tuple(Score(value=reward) for reward in rewards),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [[-0.5, 0.5], [-1.0, 1.0]]),
        ("opo", [[-2 / 3, 1 / 3], [-4 / 3, 2 / 3]]),  # the second episode is twice as long
    ],
)
def test_every_episode_has_the_advantage_of_its_step(name: str, expected: list[list[float]]) -> None:
    found = episode_advantages(AlgorithmConfig(advantage=name), [group(0.0, 1.0), group(0.0, 2.0)])
    assert found is not None
    assert [values.tolist() for values in found] == [pytest.approx(values) for values in expected]


def test_where_tokens_have_their_own_there_is_none() -> None:
    assert episode_advantages(AlgorithmConfig(advantage="step_returns"), [group(0.0, 1.0)]) is None
