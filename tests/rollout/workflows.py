"""Workflows that tests name by path, in this process and in others."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from penstock.rollout.episode_rollout import Rollout
from penstock.types import Task, Turn


async def twice(task: Task, rollout: Rollout) -> None:
    """Answers, is told `+1=`, and answers again."""
    first = await rollout.generate(task.prompt)
    await rollout.generate(rollout.continue_(first, "+1="))


async def broken(task: Task, rollout: Rollout) -> None:
    await rollout.generate(task.prompt)
    raise ZeroDivisionError("by nothing")


async def exits(task: Task, rollout: Rollout) -> None:
    raise SystemExit(3)


async def odd(task: Task, rollout: Rollout) -> Any:
    await rollout.generate(task.prompt)
    return 0.5


async def silent(task: Task, rollout: Rollout) -> None:
    pass


async def endless(task: Task, rollout: Rollout) -> None:
    await rollout.generate(task.prompt)
    await asyncio.Event().wait()


async def too_long(task: Task, rollout: Rollout) -> None:
    await rollout.generate([1] * 1000)


async def hides_errors(task: Task, rollout: Rollout) -> None:
    try:
        await rollout.generate(task.prompt)
    except Exception:
        raise ValueError("something else") from None


async def blocks(task: Task, rollout: Rollout) -> Turn:
    """Holds its thread until the file that the task names is there."""
    turn = await rollout.generate(task.prompt)
    _block(Path(task.columns["began"]), Path(task.columns["until"]))
    return turn


async def dies_once(task: Task, rollout: Rollout) -> None:
    """Takes its process along, the first time."""
    _die_once(Path(task.columns["mark"]))
    await rollout.generate(task.prompt)


def _block(began: Path, until: Path) -> None:
    began.touch()
    while not until.exists():
        time.sleep(0.01)


def _die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os._exit(7)


class Kept:
    """A class is made into an object; that object serves every episode."""

    async def run(self, task: Task, rollout: Rollout) -> Turn:
        return await rollout.generate(task.prompt)


kept = Kept()
not_async = len
