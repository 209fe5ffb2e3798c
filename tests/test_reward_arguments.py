import math
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.reward_arguments import read_rewards
from penstock.scoring.builtin_rewards import exact_match
from penstock.types import Task


def style(task: Task, completion: str) -> float:
    return 1.0


STYLE = f"{__name__}:style"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (style, [(STYLE, 1.0, None)]),
        ("auto", [("auto", 1.0, None)]),
        ((style, 0.5), [(STYLE, 0.5, None)]),
        ([style, "auto"], [(STYLE, 1.0, None), ("auto", 1.0, None)]),
        ([(style, 2), ("auto", 0.5)], [(STYLE, 2, None), ("auto", 0.5, None)]),
        ({"a": style, "b": ("auto", -1)}, [(STYLE, 1.0, "a"), ("auto", -1, "b")]),
        ([{"path": "auto", "weight": 3, "name": "n"}], [("auto", 3, "n")]),
        ({"path": "auto", "weight": 3}, [("auto", 3, None)]),
        ({"functions": {"a": (style, 4)}, "timeout_s": 2.0}, [(STYLE, 4, "a")]),
        ({"timeout_s": 2.0}, []),
    ],
)
def test_every_way_to_say_what_counts(given: Any, found: list[tuple[str, float, str | None]]) -> None:
    rewards, settings = read_rewards(given)
    assert [(one.path, one.weight, one.name) for one in rewards] == found
    assert settings == ({"timeout_s": 2.0} if isinstance(given, dict) and "timeout_s" in given else {})


def test_what_has_no_path_is_called_here_with_its_weight_and_name() -> None:
    (one,), _ = read_rewards({"short": (lambda task, completion: -len(completion), 0.25)})
    assert one.path is None
    reward = one.in_this_process("cpu")
    assert (reward.name, reward.weight, reward.call(None, "four")) == ("short", 0.25, -4)


def test_a_builtin_beside_it_keeps_its_name() -> None:
    reward = read_rewards("exact_match")[0][0].in_this_process("cpu")
    assert (reward.name, reward.call) == ("exact_match", exact_match)


@pytest.mark.parametrize("given", [3, None, [], {}, [3], {"a": 3}, (style, math.nan), [(style, math.inf)]])
def test_what_is_no_reward_is_one_sentence(given: Any) -> None:
    with pytest.raises(UserError, match="reward must be a (function, its path|finite number)"):
        read_rewards(given)
