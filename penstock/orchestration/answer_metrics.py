"""What the controller knows of a step's answers: how long they are, how many were cut off, and what each reward
function gave. The trainer's own metrics stand beside these in a row of `metrics.jsonl`."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from penstock.types import ScoredGroup


def answer_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Of every episode that did not fail. An answer has the tokens of all its turns, and is truncated when its last
    turn ended at the token limit. `rewritten_by_client` and `rewritten_by_template` are there only where agents'
    turns could not go on after the tokens before them, `unread_answers` where clients left before their end."""
    episodes = [episode for scored in groups for episode in scored.group.episodes]
    if not episodes:
        return {}
    lengths = [episode.num_output_tokens for episode in episodes]
    truncated = [bool(episode.turns) and episode.turns[-1].finish_reason == "length" for episode in episodes]
    rewrites = Counter[str]()
    for episode in episodes:
        if episode.rewrites:
            rewrites.update(episode.rewrites)
    unread = sum(episode.unread_answers for episode in episodes)
    return {
        **({"unread_answers": float(unread)} if unread else {}),
        **{f"rewritten_by_{who}": float(count) for who, count in sorted(rewrites.items())},
        "answer_tokens_mean": float(np.mean(lengths)),
        "answer_tokens_max": float(max(lengths)),
        "truncated_fraction": float(np.mean(truncated)),
    }


def reward_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """The mean of every reward function (unweighted) and of every named part of one, by its name."""
    values: dict[str, list[float]] = {}
    for scored in groups:
        for score in scored.scores:
            for name, value in score.parts.items():
                values.setdefault(name, []).append(value)
    return {name: float(np.mean(given)) for name, given in sorted(values.items())}


def step_metrics(groups: Sequence[ScoredGroup], of_trainer: dict[str, float]) -> dict[str, float]:
    """All metrics of a step. `reward_NAME` is a function's mean; one whose name the trainer's metrics have taken
    (`reward_mean`, `reward_std`) is `reward_function_NAME`."""
    rewards = {
        f"reward_{name}" if f"reward_{name}" not in of_trainer else f"reward_function_{name}": mean
        for name, mean in reward_means(groups).items()
    }
    return {**of_trainer, **answer_metrics(groups), **rewards}
