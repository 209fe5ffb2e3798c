"""Runs a workflow as an episode. An error of the workflow makes a failed episode, not an exception."""

import asyncio
import traceback
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.errors import RequestRefused
from penstock.http_server.http_calls import HttpConfig, is_transient
from penstock.records import Episode, Score, Turn
from penstock.records.interfaces import Tokenizer
from penstock.records.scores import plain_column, plain_step
from penstock.rollout.episode_rollout import Rollout, TokenSource
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.replayed_calls import KeepCall, keep_nothing
from penstock.rollout.workflow import Workflow, Workflows

WORKFLOW_ERROR = "workflow_error"
"""The workflow raised, or returned something invalid."""
UNAVAILABLE = "workflow_unavailable"
"""The workflow had a transient error: it could not reach something, and a retry may help."""
TIMEOUT = "timeout"
"""The episode took longer than `rollout.timeout_s`."""
REFUSED = "refused"
"""No engine can ever serve a turn that the workflow asked for."""
WORKER_DIED = "worker_died"
"""The process that ran the workflow ended, or stopped answering."""


class EpisodeRunner(Protocol):
    """Runs episodes, many at once. It raises only what ends the run; a failed episode is an `Episode`."""

    async def run(self, spec: EpisodeSpec) -> Episode: ...

    async def close(self) -> None: ...


class LocalEpisodes:
    """Runs episodes on the event loop of its caller, as an `EpisodeRunner`. A workflow that blocks stops
    everything else there."""

    def __init__(
        self,
        engine: TokenSource,
        tokenizer: Tokenizer,
        workflow: Workflow | None = None,
        keep_call: KeepCall = keep_nothing,
        http: HttpConfig | None = None,
    ) -> None:
        """Set up the runner. `keep_call` stores the results of calls through rollouts, and `http` configures
        services that tasks name."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._workflows = Workflows(workflow, http)
        self._keep_call = keep_call

    async def run(self, spec: EpisodeSpec) -> Episode:
        workflow = self._workflows.of(spec.task)
        return await run_episode(workflow, Rollout(spec, self._engine, self._tokenizer, self._keep_call))

    async def close(self) -> None:
        pass


async def run_episode(workflow: Workflow, rollout: Rollout) -> Episode:
    """Run a workflow to its end or its time limit. Errors of engines are raised; those of the workflow make a
    failed episode."""
    spec = rollout.spec
    limit = asyncio.timeout(spec.timeout_s)
    try:
        async with limit:
            result = await workflow.run(spec.task, rollout)
        episode = _episode(result, rollout)
    except RequestRefused as error:
        episode = failed_episode(spec, REFUSED, str(error), rollout)
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        episode = failed_episode(spec, WORKFLOW_ERROR, "the workflow cancelled itself", rollout)
    except (Exception, SystemExit) as error:
        if limit.expired():
            so_far = "" if rollout.has_begun else ", and it had not asked for its first turn by then"
            message = f"the episode took longer than rollout.timeout_s={spec.timeout_s:g}{so_far}"
            episode = failed_episode(spec, TIMEOUT, message, rollout)
        elif rollout.is_limited and rollout.turns:
            episode = _cut_short(rollout)
        else:
            failure = UNAVAILABLE if is_transient(error) else WORKFLOW_ERROR
            episode = failed_episode(spec, failure, _describe(error), rollout)
    finally:
        rollout.close()
    if rollout.engine_error is not None:
        raise rollout.engine_error
    return episode


def failed_episode(spec: EpisodeSpec, failure: str, message: str, rollout: Rollout | None = None) -> Episode:
    """Return a failed episode, with the turns of the rollout if one is given."""
    return Episode(
        task_id=spec.task.id,
        turns=() if rollout is None else rollout.turns,
        index=spec.index,
        failure=failure,
        message=message,
        rewrites={} if rollout is None else rollout.rewrites,
    )


def _episode(result: Any, rollout: Rollout) -> Episode:
    spec = rollout.spec
    if isinstance(result, Episode):
        return msgspec.structs.replace(result, index=spec.index, rewrites=result.rewrites or rollout.rewrites)
    if isinstance(result, Score):
        rollout.set_reward(result.value, result.parts)
    elif isinstance(result, float | int) and not isinstance(result, bool):
        rollout.set_reward(result)
    elif not isinstance(result, Turn | None):
        raise TypeError(
            "a workflow must return an Episode, a Turn, a reward (a number or a Score) or None, "
            f"got {type(result).__name__}"
        )
    turns = _path_to(result, rollout.turns) if isinstance(result, Turn) else rollout.turns
    if not turns:
        raise ValueError("the workflow ended without a turn; it must generate at least one")
    episode = _made(rollout, turns)
    if isinstance(result, Score):
        if (misfit := result.misfit(episode)) is not None:
            raise ValueError(f"the workflow returned {misfit}")
        return msgspec.structs.replace(
            episode,
            steps=tuple(plain_step(step) for step in result.steps),
            columns=tuple(plain_column(column) for column in result.columns),
        )
    return episode


def _cut_short(rollout: Rollout) -> Episode:
    """Return the episode of a workflow that raised after reaching a limit. Its reward is 0 unless one was set.
    It doesn't count as failed, or endless answers would cost the policy nothing."""
    if rollout.reward is None:
        rollout.set_reward(0.0)
    return _made(rollout, rollout.turns)


def _made(rollout: Rollout, turns: tuple[Turn, ...]) -> Episode:
    return Episode(
        task_id=rollout.spec.task.id,
        turns=turns,
        index=rollout.spec.index,
        reward=rollout.reward,
        parts=rollout.parts,
        rewrites=rollout.rewrites,
    )


def _path_to(turn: Turn, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the turn and those that it continues, oldest first."""
    by_id = {one.id: one for one in turns}
    path = [turn]
    while (parent := by_id.get(path[-1].parent or "")) is not None:
        path.append(parent)
    return tuple(reversed(path))


def _is_cancelled() -> bool:
    """Return whether this task was cancelled from outside, rather than by the workflow."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _describe(error: BaseException) -> str:
    """Return the error as text, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
