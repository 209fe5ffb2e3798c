import threading
from pathlib import Path

import pytest

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks, tasks_from_rows

FILE = """
def rows(count=2):
    for number in range(count):
        yield {"prompt": f"p{number}", "answer": number}

def one_string():
    return "prompt"

def broken():
    raise RuntimeError("no network")

def endless():
    while True:
        yield {"prompt": "p"}

def leaves():
    yield {"prompt": "p"}
    raise SystemExit(0)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tasks.py"
    path.write_text(FILE)
    return path


def test_a_function_of_a_file_is_called_with_the_arguments(file: Path) -> None:
    tasks = load_tasks(TasksConfig(source=f"{file}:rows", arguments={"count": 3}))
    assert [(task.id, task.prompt, task.columns) for task in tasks] == [
        ("my_tasks.py:rows#0", "p0", {"answer": 0}),
        ("my_tasks.py:rows#1", "p1", {"answer": 1}),
        ("my_tasks.py:rows#2", "p2", {"answer": 2}),
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("rows", {"number": 3}, "raised TypeError: rows() got an unexpected keyword argument 'number'"),
        ("one_string", {}, "must return rows, got a str"),
        ("broken", {}, "called with {}, raised RuntimeError: no network"),
        ("endless", {}, "has given 50 rows and is not at its end; set tasks.limit to how many tasks to take"),
        ("leaves", {}, "called with {}, raised SystemExit: 0"),
        ("missing", {}, "has no function 'missing'"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    file: Path, name: str, arguments: dict[str, int], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tasks.task_rows.MOST_ROWS", 50)
    with pytest.raises(TaskError) as raised:
        load_tasks(TasksConfig(source=f"{file}:{name}", arguments=arguments))
    assert str(raised.value).startswith("the task source ")
    assert str(raised.value).endswith(sentence)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the task source file .*none\.py does not exist"):
        load_tasks(TasksConfig(source=f"{tmp_path}/none.py:rows"))


ENDLESS = """
def rows():
    for number in range(10**12):
        assert number < 3, "asked for more than the limit"
        yield {"prompt": str(number)}
"""


def test_a_limit_bounds_a_generator_that_never_ends(tmp_path: Path) -> None:
    module = tmp_path / "endless.py"
    module.write_text(ENDLESS)
    tasks = load_tasks(TasksConfig(source=f"{module}:rows", limit=3))
    assert [task.prompt for task in tasks] == ["0", "1", "2"]


def test_a_function_that_makes_a_whole_list_tells_that_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tasks.task_rows.TELL_EVERY_S", 0.001)
    module = tmp_path / "lists.py"
    module.write_text("def rows(told):\n    assert told.wait(30)\n    return [{'prompt': 'p'}]\n")
    told = threading.Event()
    config = TasksConfig(source=f"{module}:rows", arguments={"told": told})
    assert len(load_tasks(config, lambda line: told.set())) == 1


def test_a_source_that_fails_does_not_tell_its_secrets(tmp_path: Path) -> None:
    module = tmp_path / "tells.py"
    module.write_text("def rows(token, size):\n    raise ValueError(f'401 for {token}')\n")
    config = TasksConfig(source=f"{module}:rows", arguments={"token": "s3cret", "size": 3})
    with pytest.raises(TaskError) as raised:
        load_tasks(config)
    assert "called with {'token': '***', 'size': 3}, raised ValueError: 401 for ***" in str(raised.value)


def test_a_prompt_with_half_a_character_is_refused() -> None:
    for row in ({"prompt": "a\ud800"}, {"prompt": [{"role": "user", "content": "\udfff"}]}):
        with pytest.raises(TaskError, match="the prompt of task 0 of tasks has half of a surrogate pair"):
            tasks_from_rows([row])
