"""Rewards that come with the library, by the names that configs give them."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from penstock.gym_datasets import COLUMN, create_dataset, unpack
from penstock.types import Episode, Score, Task

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(task: Task, completion: str) -> float:
    """1 when the completion is the task's `answer`, white space at the ends aside."""
    if "answer" not in task.columns:
        raise ValueError(
            f"task {task.id!r} has no column 'answer' to compare with; "
            f"name a reward of your own in reward.functions"
        )
    return float(completion.strip() == str(task.columns["answer"]).strip())


def own(task: Task, episode: Episode) -> Score:
    """What the episode's workflow or agent said that it is worth."""
    if episode.reward is None:
        raise ValueError(
            f"an episode of task {task.id!r} has no reward of its own; return one from the workflow, or let the "
            "agent POST it to /episodes/KEY/reward"
        )
    return Score(value=episode.reward, parts=episode.parts)


def verify(task: Task, completion: str) -> float:
    """The verdict, 0 to 1, of the reasoning_gym dataset that the task is from, on the last `<answer>…</answer>`, or
    on all of a completion that has none."""
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


def auto(task: Task, episode: Episode) -> float | Score:
    """The episode's own reward where it has one; else reasoning_gym's verifier for its tasks, and an exact match
    for others."""
    if episode.reward is not None:
        return own(task, episode)
    return verify(task, episode.text) if COLUMN in task.columns else exact_match(task, episode.text)


BUILTINS: dict[str, Callable[..., float | Score]] = {
    "auto": auto,
    "episode": own,
    "exact_match": exact_match,
    "reasoning_gym": verify,
}
