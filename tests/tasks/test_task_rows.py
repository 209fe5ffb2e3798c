"""Rows become tasks, or a sentence that says what is wrong with them."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.errors import TaskError
from penstock.records import Message, Task
from penstock.tasks import task_rows
from penstock.tasks.config import TasksConfig
from penstock.tasks.task_rows import Row, plain, resolve_chat, take_rows, tasks_from_rows


def one(row: Any, **config: Any) -> Task:
    return tasks_from_rows([row], TasksConfig(source="data/rows.jsonl", **config))[0]


def test_a_string_prompt_and_its_columns() -> None:
    task = one({"prompt": "1+1=", "answer": "2", "level": 3})
    assert (task.id, task.prompt, task.columns) == ("rows.jsonl#0", "1+1=", {"answer": "2", "level": 3})
    assert not task.is_chat


def test_a_row_may_bring_its_own_id_and_name_its_prompt_otherwise() -> None:
    task = one({"id": 17, "question": "why?"}, prompt="question")
    assert (task.id, task.prompt, task.columns) == ("17", "why?", {})


def test_chat_messages() -> None:
    task = one({"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]})
    assert task.prompt == (Message(role="user", content="hi"), Message(role="assistant", content="yes?"))
    assert task.is_chat


def test_string_prompts_can_be_made_chat_with_a_system_message() -> None:
    task = one({"prompt": "hi"}, as_chat=True, system="Be brief.")
    assert task.prompt == (Message(role="system", content="Be brief."), Message(role="user", content="hi"))


def test_a_system_message_of_the_row_is_kept() -> None:
    messages = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "hi"}]
    prompt = one({"prompt": messages}, system="Be brief.").prompt
    assert [message.content for message in prompt if isinstance(message, Message)] == ["Sing.", "hi"]


def test_a_task_may_name_its_own_workflow() -> None:
    task = one({"prompt": "p", "workflow": "flows.py:tools", "a": 1})
    assert (task.workflow, task.columns) == ("flows.py:tools", {"a": 1})
    assert one({"prompt": "p", "workflow": None}).workflow is None
    left_out = one({"prompt": "p", "workflow": "by hand", "a": 1}, columns=("a",))
    assert (left_out.workflow, left_out.columns) == (None, {"a": 1})
    with pytest.raises(
        TaskError, match="the column 'workflow' of task 0 of .* must be module:function.*'hand'"
    ):
        one({"prompt": "p", "workflow": "hand"})
    with pytest.raises(TaskError, match="must be module:function.* got '5'"):
        one({"prompt": "p", "workflow": 5})


@pytest.mark.parametrize("agent", ["python agent.py", "./agent.sh", "/opt/agent", "http://host:80/env"])
def test_a_task_may_name_a_command_or_a_url(agent: str) -> None:
    assert one({"prompt": "p", "workflow": agent}).workflow == agent


def test_only_the_columns_asked_for_are_kept() -> None:
    assert one({"prompt": "p", "a": 1, "image": object()}, columns=("a",)).columns == {"a": 1}


def test_numpy_values_become_plain() -> None:
    value = {"a": np.int64(3), "b": np.array([[1.5, 2.0]]), "c": (np.str_("x"),), "d": [np.bool_(True)]}
    converted = plain(value)
    assert converted == {"a": 3, "b": [[1.5, 2.0]], "c": ("x",), "d": [True]}
    assert type(converted["a"]) is int
    assert type(converted["c"][0]) is str
    assert type(converted["d"][0]) is bool


def test_the_limit_takes_the_first_rows_and_reads_no_further() -> None:
    def endless() -> Any:
        number = 0
        while True:
            yield {"prompt": str(number)}
            number += 1

    tasks = tasks_from_rows(endless(), TasksConfig(limit=3))
    assert [task.prompt for task in tasks] == ["0", "1", "2"]


def test_tasks_pass_through() -> None:
    task = Task(id="mine", prompt="p")
    assert tasks_from_rows([task])[0] is task


@pytest.mark.parametrize(
    ("rows", "config", "sentence"),
    [
        ([], {}, "the task source 's' is empty; there must be at least one task"),
        (["text"], {}, "task 0 of s must be a row of named columns, got a str"),
        ([{"q": 1, "r": 2}], {}, "task 0 of s has no column 'prompt'; its columns: q, r"),
        ([{}], {}, "task 0 of s has no column 'prompt'; its columns: none"),
        (
            [{"prompt": "x"}, {"prompt": 5}],
            {},
            "the prompt of task 1 of s must be a string or a list of messages with role and content, got '5'",
        ),
        (
            [{"prompt": []}],
            {},
            "the prompt of task 0 of s must be a string or a list of messages with role and content, "
            "got '[]'",
        ),
        (
            [{"prompt": [{"role": "user"}]}],
            {},
            "the prompt of task 0 of s must be a string or a list of messages with role and content, "
            "got \"[{'role': 'user'}]\"",
        ),
        (
            [{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}],
            {},
            "task 1 of s has the id 'a' of an earlier one; ids must differ",
        ),
        (
            [{"prompt": "x"}],
            {"system": "Be brief.", "as_chat": False},
            "tasks.system needs chat messages, but the prompt of task 0 of s is a string; "
            "set tasks.as_chat=true",
        ),
        (
            [{"prompt": "x"}],
            {"columns": ("a",)},
            "task 0 of s has no column 'a', which tasks.columns asks for",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(rows: list[Any], config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError) as raised:
        tasks_from_rows(rows, TasksConfig(source="s", **config))
    assert str(raised.value) == sentence


def test_a_column_that_cannot_travel_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"^column 'image' of task 0 of s can't be sent to a scoring process"):
        tasks_from_rows([{"prompt": "p", "image": object()}], source="s")


def test_a_source_that_takes_long_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_rows, "TELL_EVERY_S", 0.001)
    said: list[str] = []
    has_told = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if "1 so far" in line:
            has_told.set()

    def slow() -> Iterator[Row]:
        yield {"prompt": "a"}
        assert has_told.wait(30)
        yield {"prompt": "b"}

    assert len(take_rows(slow(), "mine.py:slow", 0, say)) == 2
    assert "reading tasks: 1 so far from mine.py:slow" in said


def test_more_rows_than_most_are_taken_where_a_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_rows, "MOST_ROWS", 5)
    rows: list[Row] = [{"prompt": str(number)} for number in range(9)]
    assert len(take_rows(rows, "s", 8, print)) == 8
    assert len(take_rows(rows[:5], "s", 0, print)) == 5
    assert len(take_rows(rows, "s", 0, print)) == 9  # a list has an end
    with pytest.raises(TaskError, match="'s' has given 5 rows and is not at its end; set tasks.limit"):
        take_rows(iter(rows), "s", 0, print)


ASKED, BRIEF = Message(role="user", content="1+1?"), Message(role="system", content="Be brief.")
ROWS = [{"prompt": "1+1?"}, {"prompt": [ASKED]}]


@pytest.mark.parametrize(
    ("config", "has_template", "prompts"),
    [
        ({}, True, [(ASKED,), (ASKED,)]),
        ({}, False, ["1+1?", (ASKED,)]),
        ({"as_chat": False}, True, ["1+1?", (ASKED,)]),
        ({"as_chat": True}, False, [(ASKED,), (ASKED,)]),
        ({"system": "Be brief."}, True, [(BRIEF, ASKED), (BRIEF, ASKED)]),
    ],
)
def test_strings_become_messages_where_the_model_has_a_template(
    config: dict[str, object], has_template: bool, prompts: list[object]
) -> None:
    section = TasksConfig.model_validate(config)
    tasks, decided = resolve_chat(tasks_from_rows(ROWS, section), section, has_template=has_template)
    assert [task.prompt for task in tasks] == prompts
    assert decided.as_chat is config.get("as_chat", has_template)


def test_a_system_message_needs_a_template() -> None:
    section = TasksConfig(system="Be brief.")
    with pytest.raises(TaskError, match="the model has no chat template; leave tasks.system out"):
        resolve_chat(tasks_from_rows(ROWS, section), section, has_template=False)


def test_what_the_run_sets_itself_is_no_template_argument() -> None:
    with pytest.raises(ValueError, match="must not have 'tokenize'"):
        TasksConfig(template_args={"tokenize": False, "enable_thinking": False})
