"""Runs the demo's workflow with a note of every turn, from which `penstock chaos` reads how much was sampled
again after a crash. A token that was kept has the version that it was sampled with; one that was sampled
again has a newer one."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.records import Task, Turn
from penstock.rollout.episode_rollout import Rollout

NOTES = "PENSTOCK_TURN_NOTES"
"""The environment variable that names the file."""


async def answer(task: Task, rollout: Rollout) -> Turn:
    turn = await rollout.generate(task.prompt)
    if not rollout.spec.is_evaluation:
        note(turn)
    return turn


def note(turn: Turn) -> None:
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps([turn.id, turn.versions.tolist()]) + "\n")


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file's lines, skipping a line that a crash has cut."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def count_again(turns: Iterable[tuple[str, list[int]]]) -> tuple[int, int]:
    """Count the tokens that were sampled again, and all that were sampled, in turns that were finished."""
    seen: dict[str, list[int]] = {}
    num_again = num_sampled = 0
    for name, versions in turns:
        before = seen.get(name, [])
        fresh = [at for at, version in enumerate(versions) if at >= len(before) or before[at] != version]
        num_sampled += len(fresh)
        num_again += sum(at < len(before) for at in fresh)
        seen[name] = versions
    return num_again, num_sampled
