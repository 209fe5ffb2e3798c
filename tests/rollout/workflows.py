"""Workflows that tests name by path, in this process and in others."""

import asyncio
import functools
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from penstock.records import Score, StepScore, Task, TokenColumn, Turn
from penstock.rollout.episode_rollout import Rollout


async def twice(task: Task, rollout: Rollout) -> None:
    """Answers, is told `+1=`, and answers again."""
    first = await rollout.generate(task.prompt)
    await rollout.generate(rollout.continue_(first, "+1="))


async def broken(task: Task, rollout: Rollout) -> None:
    await rollout.generate(task.prompt)
    raise ZeroDivisionError("by nothing")


async def unreachable(task: Task, rollout: Rollout) -> None:
    await rollout.generate(task.prompt)
    raise ConnectionRefusedError("no sandbox")


async def exits(task: Task, rollout: Rollout) -> None:
    raise SystemExit(3)


async def odd(task: Task, rollout: Rollout) -> Any:
    await rollout.generate(task.prompt)
    return "half"


async def worth(task: Task, rollout: Rollout) -> float:
    await rollout.generate(task.prompt)
    return 0.5


async def valued(task: Task, rollout: Rollout) -> Score:
    """Values its steps and its tokens, with numbers as other libraries return them."""
    first = await rollout.generate(task.prompt)
    second = await rollout.generate(rollout.continue_(first, "+1="))
    last = StepScore(turn=1, start=0, end=np.int64(len(second.output_ids)), value=np.float64(0.5))
    teacher = TokenColumn(turn=0, name="teacher", values=[-1, -2])  # type: ignore[arg-type]
    return Score(value=0.5, parts={"style": 1.0}, steps=(last,), columns=(teacher,))


async def streamed(task: Task, rollout: Rollout) -> float:
    """Asks over HTTP, as agents do, and is worth the number of events that the answer came in."""
    async with aiohttp.ClientSession(headers=_key(rollout)) as session:
        body = {"prompt": task.prompt, "stream": True}
        async with session.post(rollout.endpoint.base_url + "/completions", json=body) as response:
            return float(sum([line.startswith(b"data: {") async for line in response.content]))


@functools.lru_cache
def _kept_session(base_url: str) -> aiohttp.ClientSession:
    """As langchain-openai keeps its clients: one for each address, for as long as the process lives."""
    return aiohttp.ClientSession(base_url)


async def keeps_its_client(task: Task, rollout: Rollout) -> None:
    session = _kept_session(rollout.endpoint.base_url + "/")
    async with session.post("completions", json={"prompt": task.prompt}, headers=_key(rollout)) as response:
        response.raise_for_status()
        await response.read()


async def walks_out(task: Task, rollout: Rollout) -> None:
    """Leaves in the middle of a stream, and then asks something else."""
    url = rollout.endpoint.base_url + "/completions"
    async with aiohttp.ClientSession(headers=_key(rollout)) as session:
        response = await session.post(url, json={"prompt": task.prompt, "stream": True})
        await response.content.readline()
        response.close()
        async with session.post(url, json={"prompt": "1+1="}) as response:
            await response.read()


def _key(rollout: Rollout) -> dict[str, str]:
    return {"Authorization": f"Bearer {rollout.endpoint.api_key}"}


async def endless_turns(task: Task, rollout: Rollout) -> None:
    while True:
        await rollout.generate(task.prompt)


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


async def dies_always(task: Task, rollout: Rollout) -> None:
    os._exit(7)


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


async def calls(task: Task, rollout: Rollout) -> None:
    """Asks what it has written into a file, through the rollout, and answers after that."""
    found = await rollout.call(_append, str(task.columns["file"]), rollout.spec.name)
    await rollout.generate(rollout.render(f"{found['lines']}="))


def _append(path: str, line: str) -> dict[str, int]:
    with Path(path).open("a") as file:
        file.write(line + "\n")
    return {"lines": len(Path(path).read_text().splitlines())}
