"""Makes tasks from the rows of any source (plain mappings), with the checks that all sources share."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.errors import TaskError
from penstock.http_server.http_calls import is_url
from penstock.records import Message, Task
from penstock.tasks.config import TasksConfig
from penstock.usercode import is_command, is_function_path

WORKFLOW = "workflow"
"""The column with which a task names its own workflow."""
TELL_EVERY_S = 5.0
MOST_ROWS = 1_000_000
"""The most rows of a function without `tasks.limit`: an endless one would fill the memory."""
Row = Mapping[str, Any] | Task


def tasks_from_rows(
    rows: Iterable[Row], config: TasksConfig | None = None, *, source: str = "tasks"
) -> list[Task]:
    """Make tasks of the first `config.limit` rows: at least one, with unique ids. A `Task` is used as it is.

    A row's id is its own `id` column, or else the source's name and the row's number.
    """
    config = config or TasksConfig(source=source)
    tasks: dict[str, Task] = {}
    for index, row in enumerate(islice(rows, config.limit or None)):
        task = row if isinstance(row, Task) else _task(row, index, config)
        if task.id in tasks:
            raise TaskError(
                f"task {index} of {config.source} has the id {task.id!r} of an earlier one; ids must differ"
            )
        tasks[task.id] = task
    if not tasks:
        raise TaskError(f"the task source {config.source!r} is empty; there must be at least one task")
    return list(tasks.values())


def take_rows(rows: Iterable[Row], source: str, limit: int, say: Callable[[str], None]) -> list[Row]:
    """Take the first `limit` rows of a user's function, or all. Without a limit, more than `MOST_ROWS` rows of
    unknown length are refused. `say` reports progress while this takes long, even when no row arrives."""
    taken: list[Row] = []
    has_end = limit > 0 or isinstance(rows, Sized)
    is_done = threading.Event()

    def tell() -> None:
        while not is_done.wait(TELL_EVERY_S):
            say(f"reading tasks: {len(taken):,} so far from {source}")

    thread = threading.Thread(target=tell, name="tasks", daemon=True)
    thread.start()
    try:
        for row in islice(rows, limit or (None if has_end else MOST_ROWS + 1)):
            taken.append(row)
    finally:
        is_done.set()
        thread.join()
    if not has_end and len(taken) > MOST_ROWS:
        raise TaskError(
            f"the task source {source!r} has given {MOST_ROWS:,} rows and is not at its end; set tasks.limit to "
            "how many tasks to take"
        )
    return taken


def plain(value: Any) -> Any:
    """Convert arrays to lists and numpy scalars to Python's own, so that the value can travel as data."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return value


def _task(row: Any, index: int, config: TasksConfig) -> Task:
    where = f"task {index} of {config.source}"
    if not isinstance(row, Mapping):
        raise TaskError(f"{where} must be a row of named columns, got a {type(row).__name__}")
    if config.prompt not in row:
        known = ", ".join(map(str, row)) or "none"
        raise TaskError(f"{where} has no column {config.prompt!r}; its columns: {known}")
    own_id = row.get("id")
    prompt = _prompt(row[config.prompt], where, config)
    for text in [prompt] if isinstance(prompt, str) else [message.content for message in prompt]:
        if any(0xD800 <= ord(char) < 0xE000 for char in text):
            raise TaskError(f"the prompt of {where} has half of a surrogate pair in it, which is no text")
    return Task(
        id=f"{Path(config.source).name}#{index}" if own_id is None else str(own_id),
        prompt=prompt,
        columns=_columns(row, where, config),
        workflow=_workflow(row, where, config),
    )


def _workflow(row: Mapping[str, Any], where: str, config: TasksConfig) -> str | None:
    """Return the workflow that the row's column `workflow` names, unless `tasks.columns` leaves that column out."""
    path = row.get(WORKFLOW)
    if path is None or (config.columns is not None and WORKFLOW not in config.columns):
        return None
    if not isinstance(path, str) or not (is_function_path(path) or is_url(path) or is_command(path)):
        raise TaskError(
            f"the column 'workflow' of {where} must be module:function, path/to/file.py:function, a URL or a "
            f"command, got {str(path)[:80]!r}; name the columns to keep in tasks.columns if it is something else"
        )
    return path


def _columns(row: Mapping[str, Any], where: str, config: TasksConfig) -> dict[str, Any]:
    """Return the columns for the reward and the workflow, as plain data that can travel to another process."""
    names = [name for name in row if name not in (config.prompt, "id", WORKFLOW)]
    if config.columns is not None:
        missing = [name for name in config.columns if name not in row]
        if missing:
            raise TaskError(f"{where} has no column {missing[0]!r}, which tasks.columns asks for")
        names = [name for name in config.columns if name != WORKFLOW]
    columns = {str(name): plain(row[name]) for name in names}
    for name, value in columns.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TaskError(
                f"column {name!r} of {where} can't be sent to a scoring process ({error}); "
                f"make it plain data, or leave it out with tasks.columns"
            ) from error
    return columns


def _prompt(value: Any, where: str, config: TasksConfig) -> str | tuple[Message, ...]:
    if isinstance(value, str) and config.as_chat is not True:
        if config.system is not None and config.as_chat is False:
            raise TaskError(
                f"tasks.system needs chat messages, but the prompt of {where} is a string; "
                f"set tasks.as_chat=true"
            )
        return value
    messages = (Message(role="user", content=value),) if isinstance(value, str) else _messages(value, where)
    if config.system is not None and messages[0].role != "system":
        return (Message(role="system", content=config.system), *messages)
    return messages


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if isinstance(value, list | tuple) and value and all(_is_message(message) for message in value):
        return tuple(
            message
            if isinstance(message, Message)
            else Message(role=message["role"], content=message["content"])
            for message in value
        )
    raise TaskError(
        f"the prompt of {where} must be a string or a list of messages with role and content, "
        f"got {str(value)[:80]!r}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Message) or (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def resolve_chat(
    tasks: Sequence[Task], config: TasksConfig, *, has_template: bool
) -> tuple[list[Task], TasksConfig]:
    """Return the tasks in the form that the model expects, and the section with `auto` replaced by the decision."""
    if config.as_chat != "auto":
        return list(tasks), config
    if not has_template and config.system is not None and any(not task.is_chat for task in tasks):
        raise TaskError(
            "tasks.system needs chat messages, but the prompts are strings and the model has no chat template; "
            "leave tasks.system out, or take a model made for chat"
        )
    decided = config.model_copy(update={"as_chat": has_template})
    if not has_template:
        return list(tasks), decided
    return [task if task.is_chat else _as_chat(task, config.system) for task in tasks], decided


def _as_chat(task: Task, system: str | None) -> Task:
    assert isinstance(task.prompt, str)
    before = () if system is None else (Message(role="system", content=system),)
    return msgspec.structs.replace(task, prompt=(*before, Message(role="user", content=task.prompt)))
