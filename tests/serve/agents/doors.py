"""An open front door over an engine that says what a test wants, and clients of one episode."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from yarl import URL

from penstock.engines.scripted import ScriptedEngine
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import GenerateRequest, SamplingParams, Task
from penstock.rollout.episode_rollout import Endpoint, Rollout, TokenSource
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.serve.agents.agent_server import AgentServer

END = 256
"""The byte tokenizer's end of an answer."""


def saying(tokenizer: ChatTokenizer, *answers: str, **settings: Any) -> ScriptedEngine:
    """One answer after the other, the last for ever."""
    left = list(answers)

    def script(request: GenerateRequest) -> list[int]:
        return [*tokenizer.encode(left.pop(0) if len(left) > 1 else left[0]), END]

    return ScriptedEngine(script, **settings)


@dataclass
class Visit:
    """One episode's way in. `http` sends the key with every request."""

    door: AgentServer
    rollout: Rollout
    endpoint: Endpoint
    http: aiohttp.ClientSession

    @property
    def root(self) -> str:
        return self.endpoint.base_url.removesuffix("/v1")

    @property
    def port(self) -> int:
        return URL(self.root).port or 0

    def openai(self, **settings: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.endpoint.base_url, api_key=self.endpoint.api_key, **settings)


def a_spec(index: int = 0, **settings: Any) -> EpisodeSpec:
    task = Task(id="t", prompt="hello", columns={"answer": "4"})
    sampling = SamplingParams(max_tokens=400, seed=3, stop_token_ids=(END,))
    return EpisodeSpec(group=12, index=index, task=task, sampling=sampling, **settings)


@asynccontextmanager
async def opened(
    engine: TokenSource,
    tokenizer: ChatTokenizer,
    *,
    max_context: int = 1024,
    names: dict[str, str] | None = None,
    streams: bool = True,
) -> AsyncIterator[Callable[..., Visit]]:
    """Gives `visit(spec)`, which admits an episode."""
    door = AgentServer(engine, tokenizer, model="echo", max_context=max_context, names=names, streams=streams)
    await door.open()
    sessions: list[aiohttp.ClientSession] = []

    def visit(spec: EpisodeSpec | None = None) -> Visit:
        rollout = Rollout(spec or a_spec(), engine, tokenizer)
        endpoint = door.admit(rollout)
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        sessions.append(aiohttp.ClientSession(headers=headers))
        return Visit(door, rollout, endpoint, sessions[-1])

    try:
        yield visit
    finally:
        for session in sessions:
            await session.close()
        await door.close()
