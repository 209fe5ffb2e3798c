"""Runs a command as an agent: it is started for every episode and uses the run through OpenAI's API.

Its environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `PENSTOCK_MODEL` and `PENSTOCK_EPISODE_URL`, and its
standard input is the task as one JSON object. A last line of standard output such as `{"reward": 0.5}` sets
the reward. An exit code other than 0 fails the episode; after 75 (EX_TEMPFAIL) the episode is retried.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.records import Score, Task
from penstock.rollout.episode_rollout import Rollout

KEPT_BYTES = 64 * 1024
"""How much of a program's output is kept: its last bytes."""


class AgentFailed(Exception):
    """Raised when a program ends with an exit code other than 0."""


class AgentUnavailable(AgentFailed, ConnectionError):
    """Raised when a program ends with the exit code for "try again later" (75, EX_TEMPFAIL of sysexits.h)."""


class CommandWorkflow:
    """Runs a command as a `Workflow`. Agents are in the process group of their worker, and so end with it."""

    def __init__(self, command: str) -> None:
        try:
            self.words = tuple(shlex.split(command))
        except ValueError as error:
            raise UserError(f"the workflow command {command!r} can't be read: {error}") from error
        if not self.words or shutil.which(self.words[0]) is None:
            raise UserError(
                f"the workflow command {command!r}: there is no program {(self.words or ('',))[0]!r}"
            )

    async def run(self, task: Task, rollout: Rollout) -> Score | None:
        process = await asyncio.create_subprocess_exec(
            *self.words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(rollout),
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            said, complained, _ = await asyncio.gather(
                _tail(process.stdout), _tail(process.stderr), _write(process.stdin, task_json(task))
            )
            code = await process.wait()
        finally:
            end_tree(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
        if code != 0:
            lines = complained.decode(errors="replace").strip().splitlines()
            why = f": {lines[-1]}" if lines else ""
            failure = AgentUnavailable if code == os.EX_TEMPFAIL else AgentFailed
            raise failure(f"{self.words[0]} ended with exit code {code}{why}")
        return reward_in(said)


def environment(rollout: Rollout) -> dict[str, str]:
    """Return the environment of a program: its worker's, and the variables by which it reaches its episode."""
    endpoint = rollout.endpoint
    return os.environ | {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "PENSTOCK_MODEL": endpoint.model,
        "PENSTOCK_EPISODE_URL": endpoint.episode_url,
    }


def task_json(task: Task) -> bytes:
    """Encode the task as agents read it: an object with its id, its prompt and its columns."""
    prompt = msgspec.to_builtins(task.prompt)
    return msgspec.json.encode({**task.columns, "id": task.id, "prompt": prompt}) + b"\n"


def reward_in(output: bytes) -> Score | None:
    """Parse the reward in the last line of an output; return None if that line is something else. The episode
    checks how large the numbers may be."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        found: Any = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("reward"), float | int):
        return None
    parts = found.get("parts") or {}
    if not isinstance(parts, dict) or not all(isinstance(part, float | int) for part in parts.values()):
        raise ValueError(f"parts of a reward must be numbers by name, got {parts!r}")
    return Score(value=found["reward"], parts=parts)


def end_tree(pid: int) -> None:
    """Kill a process and its descendants. Each is stopped first, so that it starts no further ones meanwhile.
    Processes that have left their parents end with the worker."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        for child in children.read_text().split():
            end_tree(int(child))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


async def _write(pipe: asyncio.StreamWriter, data: bytes) -> None:
    """Write to a pipe that may be closed: an agent need not read its task."""
    with contextlib.suppress(ConnectionError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while piece := await stream.read(KEPT_BYTES):
        kept = (kept + piece)[-KEPT_BYTES:]
    return kept
