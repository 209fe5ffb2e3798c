"""Keeps the results of calls that a workflow makes through its rollout, and replays them when the workflow runs
again after a restart."""

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from penstock.records import CallAnswer
from penstock.rollout.episode_spec import EpisodeSpec

KeepCall = Callable[[CallAnswer], Awaitable[None]]


async def keep_nothing(answer: CallAnswer) -> None:
    """Discard the result, for a run that does not survive a crash."""


class ReplayedCalls:
    """Makes and replays the calls of one episode, numbered in the order of the calls."""

    def __init__(self, spec: EpisodeSpec, keep: KeepCall) -> None:
        self._spec = spec
        self._keep = keep
        self._num_calls = 0
        self._known = {answer.call: answer for answer in spec.calls}

    async def call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        key = key_of(function, arguments, named)
        known = self._known.get(number)
        if known is not None and known.key == key:
            return msgspec.json.decode(known.answer)
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            result = await result
        try:
            answer = msgspec.json.encode(result)
        except TypeError as error:
            raise TypeError(
                f"a function that is called through the rollout must give JSON, got {type(result).__name__} from "
                f"{_name(function)} ({error}); return lists, dicts, strings and numbers, or call it directly"
            ) from error
        spec = self._spec
        if not spec.is_evaluation:
            await self._keep(
                CallAnswer(group=spec.group, episode=spec.index, call=number, key=key, answer=answer)
            )
        return msgspec.json.decode(answer)


def key_of(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bytes:
    """Return a digest that is equal for equal calls. Of arguments that are not JSON only the type counts."""
    digest = hashlib.blake2b(_name(function).encode(), digest_size=16)
    for name, value in (*(("", value) for value in arguments), *sorted(named.items())):
        try:
            text = msgspec.json.encode(value).decode()
        except TypeError:
            text = f"<{type(value).__name__}>"
        digest.update(msgspec.json.encode((name, text)))
    return digest.digest()


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
