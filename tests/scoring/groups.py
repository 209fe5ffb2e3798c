"""Groups without engines: a task and what was answered to it."""

from typing import Any

from penstock.records import Episode, Group, Message, Task, Turn
from tests.records.builders import make_turn

CHAT = (Message(role="system", content="Add."), Message(role="user", content="1+1?"))


def a_turn(text: str) -> Turn:
    """One token a byte."""
    return make_turn([1], list(text.encode()), text=text)


def a_group(
    *texts: str,
    prompt: str | tuple[Message, ...] = "1+1=",
    task_id: str = "t",
    number: int = 0,
    **columns: Any,
) -> Group:
    task = Task(id=task_id, prompt=prompt, columns=columns)
    episodes = tuple(
        Episode(task_id=task_id, turns=(a_turn(text),), index=index) for index, text in enumerate(texts)
    )
    return Group(number=number, task=task, episodes=episodes)
