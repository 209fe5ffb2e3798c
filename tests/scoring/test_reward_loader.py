import pytest

from penstock.errors import UserError
from penstock.scoring.builtin_rewards import BUILTINS
from penstock.scoring.reward_loader import load_callable


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
