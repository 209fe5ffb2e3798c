"""Runs the HTTP server of a rollout worker, through which agents reach their episodes."""

import asyncio
import socket
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from aiohttp import web

from penstock.channel.address import allow_many_connections
from penstock.http_server.guard import guard_for
from penstock.http_server.web_server import HttpServer
from penstock.models.tokenizer import ChatTokenizer
from penstock.records import DEFAULT_POLICY
from penstock.rollout.command_workflow import task_json
from penstock.rollout.episode_rollout import Endpoint, Rollout, TokenSource
from penstock.serve.agents.episode_answers import EpisodeAnswers
from penstock.serve.agents.episode_session import EpisodeKeys, EpisodeSession
from penstock.serve.api_error import ApiError
from penstock.serve.bodies import BodyBudget, answer, body_limit, read_body
from penstock.serve.openai_routes import OpenAiRoutes
from penstock.serve.served_model import ServedModel
from penstock.serve.server_app import make_app

LEAST_BODY_BYTES = 2**20
CLOSING_S = 1.0


class RewardBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Holds the body of `POST /episodes/{key}/reward`."""

    reward: float
    parts: dict[str, float] = {}


class AgentServer:
    """Serves agents with turns from `engine`. `names` maps further model names to policies. With `streams`, a
    client that asks for a stream gets tokens as they are sampled. Otherwise it gets them when the answer is
    whole, which suits runs whose new weights restart answers."""

    def __init__(
        self,
        engine: TokenSource,
        tokenizer: ChatTokenizer,
        *,
        model: str,
        max_context: int,
        names: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        streams: bool = True,
    ) -> None:
        self.keys = EpisodeKeys()
        self._engine = engine
        self._max_context = max_context
        self._host = host
        self._model = ServedModel(
            name=model, engine=engine, tokenizer=tokenizer, max_context=max_context, created=int(time.time())
        )
        known = {DEFAULT_POLICY: DEFAULT_POLICY, model: DEFAULT_POLICY, **(names or {})}
        answers = EpisodeAnswers(self.keys, known, streams=streams)
        # The first part of a path only makes the address unique for every episode; the key tells which episode a
        # request belongs to.
        routes = [
            *OpenAiRoutes(self._model, answers, prefix="/{episode}").routes(),
            web.get("/{episode}/episodes/{key}", self.episode),
            web.post("/{episode}/episodes/{key}/reward", self.reward),
        ]
        bodies = BodyBudget(max_bytes=body_limit(max_context, least=LEAST_BODY_BYTES))
        advice = (
            "ask by OPENAI_BASE_URL as the episode was given it; with rollout.agents.host=0.0.0.0 any IP address "
            "of the machine will do, its name, and host.docker.internal"
        )
        # The server must notice when a client leaves: if it asks again, it gets the answer that was made for it.
        self._server = HttpServer(
            make_app(routes, guard=guard_for(host, advice=advice), bodies=bodies), closing_s=CLOSING_S
        )
        self._address = ""
        self._num_admitted = 0

    async def open(self) -> None:
        allow_many_connections()
        await self._server.open((self._host, 0))
        host = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
        shown = f"[{host}]" if ":" in host else host
        self._address = f"http://{shown}:{self._server.port}"

    async def close(self) -> None:
        await self._server.close()

    async def episode(self, request: web.Request) -> web.Response:
        """Answer with the task, in the JSON that a command gets on its standard input."""
        session = self.keys.session(request.match_info["key"])
        return web.Response(body=task_json(session.rollout.task), content_type="application/json")

    async def reward(self, request: web.Request) -> web.Response:
        session = self.keys.session(request.match_info["key"])
        body = await read_body(request, RewardBody)
        try:
            session.rollout.set_reward(body.reward, body.parts)
        except ValueError as error:
            raise ApiError(str(error), param="reward") from error
        return answer({"reward": body.reward})

    def close_after(self, ending: Coroutine[Any, Any, None]) -> None:
        """Close the server once `ending` is over."""

        async def close() -> None:
            try:
                await ending
            finally:
                await self.close()

        self._closing = asyncio.create_task(close())

    def admit(self, rollout: Rollout) -> Endpoint:
        """Create a key and an address for the episode of this rollout, and set them as its endpoint. Frameworks
        cache async clients by address, and each episode has its own event loop. With one address for all, an
        episode would get a client that belongs to another loop."""
        session = EpisodeSession(rollout.twin(self._engine), max_context=self._max_context)
        self._num_admitted += 1
        base_url = f"{self._address}/{rollout.spec.name}-{self._num_admitted}/v1"
        endpoint = Endpoint(base_url=base_url, api_key=self.keys.add(session), model=self._model.name)
        rollout.endpoint = endpoint
        return endpoint

    def dismiss(self, endpoint: Endpoint) -> int:
        """Expire the key of an episode that is over. Return how many of its calls were not answered."""
        return self.keys.expire(endpoint.api_key)
