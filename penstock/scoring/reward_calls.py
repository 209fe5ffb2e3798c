"""Calls reward functions on episodes. Every error becomes a `ScoringFailed` with the reason under which it is
counted. Functions get copies, so they may change their arguments without affecting anything else."""

import asyncio
import copy
import inspect
import math
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.errors import ScoringFailed
from penstock.http_server.http_calls import is_transient
from penstock.records import Episode, Group, Score, Task
from penstock.records.scores import LARGEST_REWARD, fits_float32
from penstock.scoring.builtin_rewards import BUILTINS
from penstock.scoring.functions import Reward, device_argument
from penstock.scoring.score_sum import SCORE_NAN, SCORE_SHAPE, weighted_sum
from penstock.scoring.scoring_process import NOT_TRAINING, TrainerState

SCORE_ERROR = "score_error"
"""The function raised."""
SCORE_UNAVAILABLE = "score_unavailable"
"""The function had a transient error: it could not reach something, and a retry may help."""
MAX_MESSAGE = 2000
MAX_DETAIL = 20_000
"""The most characters that are kept of an error: of its message, and of its traceback."""


def score_group(rewards: Sequence[Reward], group: Group) -> tuple[Score, ...]:
    """Call `score_episodes` without an event loop."""
    return asyncio.run(score_episodes(rewards, group.task, group.episodes))


async def score_episodes(
    rewards: Sequence[Reward],
    task: Task,
    episodes: Sequence[Episode],
    training: TrainerState = NOT_TRAINING,
) -> tuple[Score, ...]:
    """Return one score per episode: the weighted sum, with each function's own value in `parts`. `training` is for
    functions in TRL's form.

    Functions run one after another. A plain function is called once per episode, for all episodes at the same
    time if it is async. One in TRL's form is called once for all of them.
    """
    with failing(f"scoring task {task.id!r}"):
        columns: list[Sequence[Score | None]] = []
        for reward in rewards:
            if reward.form == "plain":
                columns.append(await _plain_values(reward, task, episodes))
            else:
                columns.append(await _trl_values(reward, task, episodes, training))
        return tuple(
            weighted_sum(rewards, row, task, episode)
            for row, episode in zip(zip(*columns, strict=True), episodes, strict=True)
        )


async def _plain_values(reward: Reward, task: Task, episodes: Sequence[Episode]) -> list[Score]:
    """Return the score of each episode, from one call per episode."""
    where = f"reward {reward.name!r} on task {task.id!r}"

    async def call(episode: Episode) -> Score:
        with failing(where):
            raw = reward.call(_copy_of(task), _seen(reward, episode), **device_argument(reward))
            raw = await raw if inspect.isawaitable(raw) else raw
        return raw if isinstance(raw, Score) else Score(value=_number(raw, where))

    if reward.is_async:
        return await _together(call(episode) for episode in episodes)
    scores = []
    for episode in episodes:
        scores.append(await call(episode))
    return scores


async def _trl_values(
    reward: Reward, task: Task, episodes: Sequence[Episode], training: TrainerState
) -> list[Score | None]:
    """Return the score of each episode, from one call for all of them. None means that the function does not
    apply."""
    where = f"reward {reward.name!r} on task {task.id!r}"
    logged = Logged(len(episodes), where)
    with failing(where):
        offered = {"trainer_state": training, "log_extra": logged.extra, "log_metric": logged.metric}
        raw = reward.call(**_trl_arguments(reward, task, episodes, offered))
        raw = await raw if inspect.isawaitable(raw) else raw
        values = _as_list(raw)
    if values is None:
        raise ScoringFailed(f"{where} must return a list of numbers, got {_name(raw)}", SCORE_SHAPE)
    if len(values) != len(episodes):
        raise ScoringFailed(
            f"{where} must return one value per completion, {len(episodes)}, got {len(values)}", SCORE_SHAPE
        )
    parts, extras = logged.parts(), logged.extras()
    return [
        None if value is None else Score(value=_number(value, where), parts=parts, extra=extra)
        for value, extra in zip(values, extras, strict=True)
    ]


class Logged:
    """Collects what a function in TRL's form logs in one call. A metric becomes a part of every score, and so has
    the mean of its values in the metrics of a step."""

    def __init__(self, num_episodes: int, where: str) -> None:
        self._num_episodes = num_episodes
        self._where = where
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        """Log a number: TRL's `log_metric`."""
        self._metrics.setdefault(str(name), []).append(_number(value, f"{self._where}: log_metric"))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value for each completion, or in several calls for some of them: TRL's `log_extra`."""
        self._extras.setdefault(str(column), []).extend(values)

    def parts(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}

    def extras(self) -> list[dict[str, str]]:
        """Return the texts of each completion by column."""
        for column, values in self._extras.items():
            if len(values) != self._num_episodes:
                raise ScoringFailed(
                    f"{self._where}: log_extra of {column!r} must get one value per completion, "
                    f"{self._num_episodes}, got {len(values)}",
                    SCORE_SHAPE,
                )
        return [
            {column: str(values[index]) for column, values in self._extras.items()}
            for index in range(self._num_episodes)
        ]


def _seen(reward: Reward, episode: Episode) -> Episode | str:
    if not reward.takes_episode:
        return episode.text
    return episode if reward.call in BUILTINS.values() else copy.deepcopy(episode)


async def _together(calls: Iterable[Coroutine[Any, Any, Score]]) -> list[Score]:
    """Return all results in order. The first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except* ScoringFailed as failures:
        raise failures.exceptions[0] from None
    return [one.result() for one in running]


@contextmanager
def failing(where: str) -> Iterator[None]:
    """Turn whatever a function raises into a `ScoringFailed`. `SystemExit` would end the event loop, and a
    `CancelledError` that does not come from a cancelled caller would leave the caller waiting."""
    try:
        yield
    except ScoringFailed:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        message = f"{where} raised {type(error).__name__}: {_text(error)}"
        detail = traceback.format_exc()[-MAX_DETAIL:]
        reason = SCORE_UNAVAILABLE if is_transient(error) else SCORE_ERROR
        raise ScoringFailed(message[:MAX_MESSAGE], reason, detail) from error


def is_cancelled() -> bool:
    """Return whether this task was cancelled from outside, rather than by the code in it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as inner:
        return f"(its text can't be made: {type(inner).__name__})"


def _copy_of(task: Task) -> Task:
    return msgspec.structs.replace(task, columns=copy.deepcopy(task.columns))


def _trl_arguments(
    reward: Reward, task: Task, episodes: Sequence[Episode], offered: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments that TRL passes, `offered` among them, without those that the function has no parameter
    for."""
    size = len(episodes)
    completions: list[Any] = [episode.text for episode in episodes]
    prompts: list[Any] = [task.prompt] * size
    if not isinstance(task.prompt, str):
        prompts = [
            [{"role": message.role, "content": message.content} for message in task.prompt]
            for _ in range(size)
        ]
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    arguments: dict[str, Any] = device_argument(reward)
    arguments |= {name: [value] * size for name, value in copy.deepcopy(task.columns).items()}
    arguments["prompts"] = prompts
    arguments["completions"] = completions
    arguments["completion_ids"] = [
        episode.turns[-1].output_ids.tolist() if episode.turns else [] for episode in episodes
    ]
    return _accepted(reward.call, arguments | offered)


def _accepted(call: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(call).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _as_list(raw: Any) -> list[Any] | None:
    """Convert lists, tuples, arrays and tensors to a list; return None for anything else."""
    if hasattr(raw, "tolist"):
        raw = raw.tolist()
    return list(raw) if isinstance(raw, list | tuple) else None


def _number(value: Any, where: str) -> float:
    if isinstance(value, str | bytes | None):
        raise ScoringFailed(f"{where} must return numbers, got {_name(value)}", SCORE_SHAPE)
    try:
        number = float(value)
    except OverflowError:  # an int that no float can hold
        number = math.inf
    except BaseException as error:  # `__float__` is user code too
        raise ScoringFailed(f"{where} must return numbers, got {_name(value)}", SCORE_SHAPE) from error
    if not fits_float32(number):
        raise ScoringFailed(
            f"{where} returned {number:g}; a reward must be finite and within ±{LARGEST_REWARD:.2g}",
            SCORE_NAN,
        )
    return number


def _name(value: Any) -> str:
    return "None" if value is None else type(value).__name__
