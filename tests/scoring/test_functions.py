"""What counts as a reward function, by which name, and what it needs."""

import pytest

from penstock.errors import UserError
from penstock.records import Task
from penstock.scoring.builtin_rewards import BUILTINS
from penstock.scoring.config import RewardConfig
from penstock.scoring.functions import calls_at_once, load_callable, load_functions, needs_group, wrap
from penstock.scoring.reward_calls import score_group
from tests.scoring.groups import a_group


def plain(task: Task, completion: str) -> float:
    return 0.0


def trl(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


async def judge(task: Task, completion: str) -> float:
    return 0.0


class Judge:
    async def __call__(self, task: Task, completion: str) -> float:
        return 0.0


def test_a_signature_of_neither_form_is_refused() -> None:
    def reward(answer: str) -> float:
        return 0.0

    with pytest.raises(UserError) as raised:
        wrap(reward)
    assert str(raised.value).startswith(
        "a reward must be reward(task, completion), reward(task, episode) or f(prompts, completions, **columns)"
    )
    assert "got reward(answer: str) -> float" in str(raised.value)


def test_loaded_functions_are_named_after_themselves_and_never_alike() -> None:
    functions = [
        "exact_match",
        {"path": "penstock.scoring.builtin_rewards:exact_match", "weight": 0.5},
        {"path": "exact_match", "name": "again"},
    ]
    rewards = load_functions(RewardConfig.model_validate({"functions": functions}))
    assert [(reward.name, reward.weight) for reward in rewards] == [
        ("exact_match", 1.0),
        ("exact_match_2", 0.5),
        ("again", 1.0),
    ]
    (score,) = score_group(rewards, a_group(" 2 ", answer=2))
    assert score.value == 2.5
    assert score.parts == {"exact_match": 1.0, "exact_match_2": 1.0, "again": 1.0}


def test_the_default_reward_compares_with_the_answer() -> None:
    rewards = load_functions(RewardConfig())
    scores = score_group(rewards, a_group("2", "3", answer="2"))
    assert [score.parts for score in scores] == [{"auto": 1.0}, {"auto": 0.0}]


def test_one_function_in_trls_form_makes_all_wait_for_the_group() -> None:
    assert not needs_group([wrap(plain), wrap(judge)])
    assert needs_group([wrap(plain), wrap(trl)])


def test_episodes_are_scored_at_once_only_where_something_is_awaited() -> None:
    assert calls_at_once([wrap(plain)], 16) == 1
    assert calls_at_once([wrap(plain), wrap(judge)], 16) == 16
    assert calls_at_once([wrap(Judge())], 16) == 16
    assert calls_at_once([wrap(judge), wrap(trl)], 16) == 1


def test_a_device_goes_to_those_who_ask_for_it() -> None:
    def on_device(task: Task, completion: str, *, device: str) -> float:
        return 0.0

    assert wrap(on_device, device="cuda:0").device == "cuda:0"
    assert wrap(plain, device="cuda:0").device is None


@pytest.mark.parametrize("name", BUILTINS)
def test_every_built_in_name_stands_for_a_function(name: str) -> None:
    assert callable(load_callable(name))


def test_a_built_in_name_is_a_short_path() -> None:
    assert load_callable("exact_match") is load_callable("penstock.scoring.builtin_rewards:exact_match")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("exact_mach", "did you mean 'exact_match'?"),
        ("reward", "built-in names: auto, episode, exact_match, reasoning_gym"),
        ("rewards.py", "built-in names: auto, episode, exact_match, reasoning_gym"),
    ],
)
def test_anything_else_gets_a_hint(path: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        load_callable(path)
    assert (
        str(raised.value)
        == f"a reward must be module:function, file.py:function or built in, got {path!r}; {hint}"
    )
