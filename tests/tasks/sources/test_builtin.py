from typing import Any

import pytest

from penstock.errors import TaskError
from penstock.tasks.sources.builtin import make_rows


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
