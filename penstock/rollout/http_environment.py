"""Runs an environment behind a URL, which returns observations and rewards for the policy's answers.

    POST URL/reset   {"episode": "g12.3", "task": {"id", "prompt", …columns}}   →  {"observation": …}
    POST URL/step    {"episode": "g12.3", "turn": 0, "action": "…"}
                     →  {"observation": …, "reward": 0, "done": false}

An observation is text or chat messages. After `reset` it may be missing; then the task's prompt is used. Rewards of
steps add up. `episode` and `turn` let a service recognise a request that is repeated after a broken connection.
"""

from typing import Any

import msgspec

from penstock.http_server.http_calls import HttpCalls, HttpConfig
from penstock.records import Task
from penstock.rollout.episode_rollout import Rollout


class HttpEnvironment:
    """Runs episodes in the environment of a service, as a `Workflow`."""

    def __init__(self, url: str, config: HttpConfig | None = None) -> None:
        self._url = url.rstrip("/")
        self._calls = HttpCalls(config or HttpConfig())

    async def run(self, task: Task, rollout: Rollout) -> float:
        name = rollout.spec.name
        prompt = msgspec.to_builtins(task.prompt)
        row = {**task.columns, "id": task.id, "prompt": prompt}
        begun = await self._post(rollout, "reset", {"episode": name, "task": row})
        shown = begun.get("observation")
        turn = await rollout.generate(task.prompt if shown is None else shown)
        reward = 0.0
        for number in range(1_000_000):
            body = {"episode": name, "turn": number, "action": turn.text}
            came = await self._post(rollout, "step", body)
            reward += _number(came.get("reward", 0.0))
            rollout.set_reward(reward)  # the reward if the episode may have no further turn
            if came.get("done"):
                break
            turn = await rollout.generate(rollout.continue_(turn, came["observation"]))
        return reward

    async def _post(self, rollout: Rollout, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call the service through `rollout.call`, so that a workflow that runs again takes no step twice."""
        answer = await rollout.call(self._calls.post, f"{self._url}/{what}", body)
        if not isinstance(answer, dict) or (
            what == "step" and not answer.get("done") and "observation" not in answer
        ):
            raise ValueError(
                f"{self._url}/{what} must answer an object with an observation, or done, got {answer!r}"
            )
        return answer


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the reward of a step must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("the reward of a step must be a number within ±1.8e+308") from error
