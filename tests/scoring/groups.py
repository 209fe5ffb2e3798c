"""Groups without engines: a task and what was answered to it."""

from typing import Any

import numpy as np

from penstock.records import Episode, Group, Message, SamplingParams, Task, Turn

CHAT = (Message(role="system", content="Add."), Message(role="user", content="1+1?"))


def a_turn(text: str) -> Turn:
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    return Turn(
        prompt_ids=np.array([1], dtype=np.int32),
        output_ids=ids,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
        finish_reason="stop",
        sampling=SamplingParams(),
        text=text,
    )


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
