"""Which key is which episode's. Keys that are over are remembered for a while, to say so."""

import secrets
from collections import deque

from aiohttp import web

from penstock.http_server.guard import bearer_token
from penstock.serve.agents.episode_session import EpisodeSession, over
from penstock.serve.api_error import ApiError

REMEMBERED = 4096


class EpisodeKeys:
    def __init__(self) -> None:
        self._sessions: dict[str, EpisodeSession] = {}
        self._expired: deque[str] = deque(maxlen=REMEMBERED)

    def add(self, session: EpisodeSession) -> str:
        key = f"pk-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def expire(self, key: str) -> int:
        """Idempotent. Returns how many answers of the episode nobody has read."""
        session = self._sessions.pop(key, None)
        if session is None:
            return 0
        self._expired.append(key)
        return session.close()

    def session(self, key: str) -> EpisodeSession:
        if key in self._sessions:
            return self._sessions[key]
        if key in self._expired:
            raise over()
        raise ApiError(
            "the key is of no episode: send the one that the episode was given, as `Authorization: Bearer KEY` "
            "(api_key of OpenAI's client)",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    def of(self, request: web.Request) -> EpisodeSession:
        """By the header that OpenAI's clients send their key in."""
        return self.session(bearer_token(request))

    @property
    def num_open(self) -> int:
        return len(self._sessions)
