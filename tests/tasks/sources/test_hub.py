"""`datasets:NAME`, with a local folder in the hub's place."""

import sys
from pathlib import Path

import pytest

from penstock.errors import MissingExtraError, TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(
        '{"question": "1+1?", "answer": "2", "tags": ["a", "b"]}\n'
        '{"question": "2+2?", "answer": "4", "tags": []}\n'
    )
    (data / "test.jsonl").write_text('{"question": "3+3?", "answer": "6", "tags": []}\n')
    return data


def test_rows_of_a_split_become_tasks(folder: Path) -> None:
    config = TasksConfig(source=f"datasets:{folder}", prompt="question", arguments={"split": "test"})
    (task,) = load_tasks(config)
    assert (task.id, task.prompt, task.columns) == ("data#0", "3+3?", {"answer": "6", "tags": []})


def test_train_is_the_split_unless_said_otherwise(folder: Path) -> None:
    tasks = load_tasks(TasksConfig(source=f"datasets:{folder}", prompt="question"))
    assert [task.columns["answer"] for task in tasks] == ["2", "4"]
    assert tasks[0].columns["tags"] == ["a", "b"]


def test_no_split_at_all_is_refused(folder: Path) -> None:
    config = TasksConfig(source=f"datasets:{folder}", prompt="question", arguments={"split": None})
    with pytest.raises(
        TaskError, match=r"needs one split in tasks.arguments, it has: test, train|train, test"
    ):
        load_tasks(config)


def test_what_datasets_cannot_load_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(TaskError) as raised:
        load_tasks(TasksConfig(source=f"datasets:{tmp_path}/none"))
    assert str(raised.value).startswith(
        f"dataset '{tmp_path}/none' could not be loaded with {{'split': 'train'}}: "
    )
    assert "\n" not in str(raised.value)


def test_a_missing_name() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(TaskError, match="datasets: must be followed by a dataset's name"):
        load_tasks(TasksConfig(source="datasets:"))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[datasets\]'"):
        load_tasks(TasksConfig(source="datasets:x"))
