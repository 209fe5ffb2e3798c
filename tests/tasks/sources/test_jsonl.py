from pathlib import Path

import pytest

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.tasks.sources import load_tasks
from penstock.tasks.sources.jsonl import read_jsonl


def test_rows_in_order_blank_lines_and_a_byte_order_mark_aside(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"prompt": "größer?"}\r\n\n  \n{"prompt": "b", "n": [1]}'.encode())
    assert read_jsonl(path) == [{"prompt": "größer?"}, {"prompt": "b", "n": [1]}]


def test_a_line_separator_inside_a_string_is_no_end_of_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_jsonl(path) == [{"prompt": "a\u2028b"}]


def test_tasks_are_named_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "id": "own"}\n')
    assert [task.id for task in load_tasks(TasksConfig(source=str(path)))] == ["data.jsonl#0", "own"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not valid JSON: Expecting value"),
        (b"\n[1, 2]\n", "line 2 must be an object, got a list"),
        (b'"text"', "line 1 must be an object, got a str"),
        (b'{"prompt": "\xff"}', "is not UTF-8 text: invalid start byte at byte 12"),
        (b'{"n": ' + b"1" * 5000 + b"}", "line 1 is not valid JSON: Exceeds the limit"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskError) as raised:
        read_jsonl(path)
    assert str(raised.value).startswith(f"{path} {sentence}")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError) as raised:
        read_jsonl(tmp_path / "none.jsonl")
    assert str(raised.value) == f"the task file {tmp_path / 'none.jsonl'} does not exist"
    with pytest.raises(
        TaskError, match=rf"^the task file none.jsonl does not exist in the current folder, {Path.cwd()}$"
    ):
        read_jsonl(Path("none.jsonl"))
