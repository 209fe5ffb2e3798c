"""The built-in task: right answers, and splits that never meet."""

from typing import Any

import pytest

from penstock.demo.arithmetic import is_held_out, make_rows, make_tasks
from penstock.errors import TaskError


def test_answers_are_the_sums_and_have_three_digits() -> None:
    for task in make_tasks("train", size=200, seed=3):
        assert isinstance(task.prompt, str)
        a, b = task.prompt.removesuffix("=").split("+")
        assert task.columns["answer"] == str(int(a) + int(b))
        assert len(task.columns["answer"]) == 3


def test_the_splits_never_meet_whatever_their_seeds() -> None:
    train = {task.prompt for seed in range(3) for task in make_tasks("train", size=20_000, seed=seed)}
    held_out = {task.prompt for seed in range(3) for task in make_tasks("heldout", size=5_000, seed=seed)}
    assert train.isdisjoint(held_out)
    assert all(is_held_out(str(prompt)) for prompt in held_out)


def test_the_held_out_part_is_a_tenth() -> None:
    held_out = make_tasks("heldout", size=10**6, seed=0)
    train = make_tasks("train", size=10**6, seed=0)
    assert len(held_out) + len(train) == 350 * 350
    assert 0.095 < len(held_out) / (350 * 350) < 0.105


def test_the_same_arguments_give_the_same_tasks() -> None:
    def ids(seed: int) -> list[str]:
        return [task.id for task in make_tasks("train", size=50, seed=seed)]

    assert ids(7) == ids(7)
    assert ids(7) != ids(8)
    assert len(set(ids(7))) == 50


def test_split_size_and_seed_are_arguments() -> None:
    tasks = make_rows("arithmetic", {"split": "heldout", "size": 10, "seed": 4})
    assert len(tasks) == 10
    assert [task.id for task in tasks] != [
        task.id for task in make_rows("arithmetic", {"split": "heldout", "size": 10})
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("poetry", {}, "the only built-in task set is builtin:arithmetic, got builtin:poetry"),
        ("arithmetic", {"sise": 3}, "builtin:arithmetic takes split, size and seed, got 'sise'"),
        (
            "arithmetic",
            {"split": "test"},
            "the split of builtin:arithmetic must be train or heldout, got 'test'",
        ),
        ("arithmetic", {"size": 0}, "the size of builtin:arithmetic must be a whole number >= 1, got 0"),
        ("arithmetic", {"size": "9"}, "the size of builtin:arithmetic must be a whole number >= 1, got '9'"),
    ],
)
def test_wrong_arguments_are_one_sentence(name: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError) as raised:
        make_rows(name, arguments)
    assert str(raised.value) == sentence
