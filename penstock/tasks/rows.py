"""From a row of any source (a plain mapping) to a `Task`, with the checks that all sources share."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.types import Message, Task


def task_of_row(row: Mapping[str, Any], *, default_id: str, where: str, config: TasksConfig) -> Task:
    """`where` names the row in errors ("data.jsonl, line 3"). Its own `id` column is used if it has one."""
    if config.prompt not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise TaskError(
            f"{where}: the row has no column {config.prompt!r} (tasks.prompt names the prompt's column), "
            f"it has: {columns}"
        )
    own_id = row.get("id")
    return Task(
        id=default_id if own_id is None else str(own_id),
        prompt=_prompt(row[config.prompt], where, config),
        columns=_columns(row, where, config),
    )


def checked(tasks: Iterable[Task], source: str, limit: int | None) -> list[Task]:
    """The first `limit` tasks, refused when there are none or when two have the same id."""
    chosen = list(tasks)[:limit]
    if not chosen:
        raise TaskError(f"{source!r} holds no tasks: at least one is needed")
    twice = [task_id for task_id, count in Counter(task.id for task in chosen).items() if count > 1]
    if twice:
        raise TaskError(f"{source!r}: task ids must be unique, but {twice[0]!r} occurs more than once")
    return chosen


def plain(value: Any) -> Any:
    """The value with arrays as lists and numpy scalars as Python's own, so that it can travel as data."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _columns(row: Mapping[str, Any], where: str, config: TasksConfig) -> dict[str, Any]:
    """The columns that reach the reward, as plain data: they travel to another process."""
    names = [name for name in row if name not in (config.prompt, "id")]
    if config.columns is not None:
        missing = [name for name in config.columns if name not in row]
        if missing:
            raise TaskError(f"{where}: the row has no column {missing[0]!r}, which tasks.columns asks for")
        names = list(config.columns)
    columns = {name: plain(row[name]) for name in names}
    for name, value in columns.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise TaskError(
                f"{where}: column {name!r} cannot be sent to a reward worker ({error}); "
                f"turn it into plain data or leave it out with tasks.columns"
            ) from error
    return columns


def _prompt(value: Any, where: str, config: TasksConfig) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise TaskError(f"{where}: the prompt must not be empty")
        if not config.as_chat:
            if config.system is not None:
                raise TaskError(
                    f"{where}: tasks.system needs chat messages, but the prompt is a string; "
                    f"set tasks.as_chat=true to turn it into one"
                )
            return value
        value = [{"role": "user", "content": value}]
    messages = _messages(value, where)
    if config.system is not None and messages[0].role != "system":
        messages = (Message(role="system", content=config.system), *messages)
    return messages


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple):
        raise TaskError(
            f"{where}: the prompt must be a string or a list of chat messages, got {type(value).__name__}"
        )
    if not value:
        raise TaskError(f"{where}: the prompt must hold at least one message, got none")
    return tuple(_message(item, where) for item in value)


def _message(item: Any, where: str) -> Message:
    if isinstance(item, Message):
        return item
    if not isinstance(item, Mapping) or not {"role", "content"} <= set(item):
        raise TaskError(f"{where}: a chat message must be an object with role and content, got {item!r}")
    if not (isinstance(item["role"], str) and isinstance(item["content"], str)):
        raise TaskError(f"{where}: a chat message's role and content must be strings, got {item!r}")
    return Message(role=item["role"], content=item["content"])
