"""The reward `reasoning_gym`: the verdict of the dataset that a task is from."""

import functools
import json
import re
from typing import Any

from penstock.gym_datasets import COLUMN, create_dataset, unpack
from penstock.types import Task

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def verify(task: Task, completion: str) -> float:
    """The dataset's own verdict, 0 to 1, on the last `<answer>…</answer>`, or on all of a completion that
    has none."""
    if COLUMN not in task.columns:
        raise ValueError(f"task {task.id!r} is not from reasoning_gym:NAME, which this reward is for")
    facts = task.columns[COLUMN]
    dataset = _dataset(facts["name"], json.dumps(facts["arguments"], sort_keys=True))
    answers = _ANSWER.findall(completion)
    answer = (answers[-1] if answers else completion).strip()
    return float(dataset.score_answer(answer, entry_of(task)))


def entry_of(task: Task) -> Any:
    """The reasoning_gym entry that a task was made from."""
    return unpack(task.columns[COLUMN]["entry"])


@functools.lru_cache(maxsize=8)
def _dataset(name: str, packed_arguments: str) -> Any:
    """A worker verifies many answers of one dataset: making it once is enough."""
    return create_dataset(name, unpack(json.loads(packed_arguments)))
