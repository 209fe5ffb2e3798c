"""Implements the built-in rewards, by the names that configs use."""

from collections.abc import Callable

from penstock.records import Episode, Score, Task
from penstock.scoring.gym_verifier import COLUMN, verify


def exact_match(task: Task, completion: str) -> float:
    """Return 1 when the completion equals the task's `answer`, ignoring white space at the ends."""
    if "answer" not in task.columns:
        raise ValueError(
            f"task {task.id!r} has no column 'answer' to compare with; "
            f"name a reward of your own in reward.functions"
        )
    return float(completion.strip() == str(task.columns["answer"]).strip())


def own(task: Task, episode: Episode) -> Score:
    """Return the reward that the episode's workflow or agent has set."""
    if episode.reward is None:
        raise ValueError(
            f"an episode of task {task.id!r} has no reward of its own; return one from the workflow, or let the "
            "agent POST it to /episodes/KEY/reward"
        )
    return Score(value=episode.reward, parts=episode.parts, steps=episode.steps, columns=episode.columns)


def auto(task: Task, episode: Episode) -> float | Score:
    """Return the episode's own reward if it has one; otherwise the verdict of reasoning_gym's verifier for its
    tasks, and an exact match for others."""
    if episode.reward is not None:
        return own(task, episode)
    return verify(task, episode.text) if COLUMN in task.columns else exact_match(task, episode.text)


BUILTINS: dict[str, Callable[..., float | Score]] = {
    "auto": auto,
    "episode": own,
    "exact_match": exact_match,
    "reasoning_gym": verify,
}
