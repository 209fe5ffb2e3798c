"""String prompts as user messages for models that were made for chat: what `tasks.as_chat: auto` decides, once the
model's tokenizer is known."""

from collections.abc import Sequence

import msgspec

from penstock.errors import TaskError
from penstock.tasks.config import TasksConfig
from penstock.types import Message, Task


def resolve_chat(
    tasks: Sequence[Task], config: TasksConfig, *, has_template: bool
) -> tuple[list[Task], TasksConfig]:
    """The tasks as the model expects them, and the section with `auto` replaced by what was decided."""
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
