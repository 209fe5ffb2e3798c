"""Calls a reward behind a URL: the service gets the task and the answer, and returns the reward.

POST URL   {"task": {"id", "prompt", …columns}, "completion": "…", "turns": [{"text", "num_tokens"}]}
answer     0.5, or {"reward": 0.5, "parts": {"style": 1}}
"""

from typing import Any

import msgspec

from penstock.http_server.http_calls import HttpCalls, HttpConfig
from penstock.records import Episode, Score, Task


class HttpReward:
    """Calls the service, as an async reward function in the plain form."""

    def __init__(self, url: str, config: HttpConfig | None = None) -> None:
        self._url = url
        self._calls = HttpCalls(config or HttpConfig())
        self.__name__ = "service"

    async def __call__(self, task: Task, episode: Episode) -> Score:
        turns = [{"text": turn.text, "num_tokens": len(turn.output_ids)} for turn in episode.turns]
        prompt = msgspec.to_builtins(task.prompt)
        body = {
            "task": {**task.columns, "id": task.id, "prompt": prompt},
            "completion": episode.text,
            "turns": turns,
        }
        return self._score(await self._calls.post(self._url, body))

    def _score(self, answer: Any) -> Score:
        found = answer if isinstance(answer, dict) else {"reward": answer}
        value, parts = found.get("reward"), found.get("parts") or {}
        numbers: list[Any] = [value, *(parts.values() if isinstance(parts, dict) else [None])]
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            raise ValueError(
                f"{self._url} must answer a number, or an object with a number as reward and numbers as parts, "
                f"got {answer!r}"
            )
        return Score(value=float(numbers[0]), parts={name: float(part) for name, part in parts.items()})
