"""Serves one episode to the agent that holds its API key: generates the turns it asks for, and recognises
requests that a client repeats.

A client that times out asks again. That must not make a second turn: the call keeps running without a
listener, and a client that repeats the request gets its answer. Turns whose answer did not reach the client
are left out of the episode.
"""

import asyncio
import hashlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from penstock.http_server.guard import bearer_token
from penstock.records import Chunk, Turn
from penstock.rollout.episode_record import EpisodeLimit
from penstock.rollout.episode_rollout import OnChunk, Rollout, ignore_chunk
from penstock.serve.agents.conversation import Conversation, PromptHistory
from penstock.serve.api_error import ApiError


class LiveAnswer:
    """Shares the chunks of a running call among listeners, which may join late or leave."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, Chunk]] = []
        self._changed = asyncio.Event()
        self._is_over = False

    def push(self, choice: int, chunk: Chunk) -> None:
        self._chunks.append((choice, chunk))
        self._tell()

    def end(self) -> None:
        """Wake the listeners, since no chunk follows, and drop the chunks. Idempotent."""
        self._is_over = True
        self._chunks = []
        self._tell()

    async def follow(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Yield the chunks so far, then new ones until the call ends. A slow listener may miss the last ones,
        which the turns contain."""
        heard = 0
        while not self._is_over:
            if heard == len(self._chunks):
                await self._changed.wait()
                continue
            heard += 1
            yield self._chunks[heard - 1]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


Make = Callable[[LiveAnswer], Awaitable["Made"]]
"""Makes the answer of a call, and pushes its chunks as they are sampled."""
MAX_CALLS_AT_ONCE = 256
"""Calls of one episode that may run at once."""
MAX_GENERATIONS_AT_ONCE = 256
"""Generations of one episode that may run at once. A call may ask for several prompts and choices."""


@dataclass(frozen=True, slots=True)
class Made:
    """Holds the result of a call: the body of its answer, and the turns behind it."""

    body: dict[str, Any]
    turns: tuple[Turn, ...]


@dataclass(slots=True, eq=False)
class Call:
    """Tracks a call that runs or is answered."""

    task: "asyncio.Task[Made]"
    live: LiveAnswer
    num_listeners: int = 0
    is_kept: bool = False
    """Its turns are part of the episode, since its answer is being sent or was sent."""
    is_delivered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallId:
    """Identifies what a call asks for, so that a repeated one is recognised. `name` is the client's
    `Idempotency-Key`, or else a hash of path and body. `is_retry` is set when there is such a key, or when
    the client says that it retries."""

    name: str
    is_retry: bool


def call_id(path: str, body: bytes, headers: Mapping[str, str]) -> CallId:
    """Identify a call by the client's `Idempotency-Key`, or else by its path and body. OpenAI's clients send a
    count of their retries, which marks repeats."""
    own = headers.get("Idempotency-Key")
    retries = headers.get("X-Stainless-Retry-Count", "0")
    name = own or hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).hexdigest()
    return CallId(name=name, is_retry=own is not None or retries not in ("", "0"))


class EpisodeSession:
    """Serves one episode. Its `rollout` belongs to the event loop that calls arrive on."""

    def __init__(self, rollout: Rollout, *, max_context: int) -> None:
        self.rollout = rollout
        self.conversation = Conversation(rollout.tokenizer)  # type: ignore[arg-type]
        self.prompts = PromptHistory(rollout.tokenizer)
        self._num_generating = 0
        self._max_context = max_context
        self._calls: dict[str, Call] = {}
        self._every: list[Call] = []
        self._is_over = False

    @contextmanager
    def listening(self, asked: CallId, make: Make) -> Iterator[Call]:
        """Listen to the call of this request: an earlier one that the client repeats, or a new one, which `make`
        answers. Unless marked as a retry, a request repeats a call only if that was not delivered and has no
        listener. The call keeps running when its listeners leave."""
        call = self._known(asked)
        if call is None:
            self._check_open()
            live = LiveAnswer()
            call = Call(asyncio.create_task(self._run(asked, make, live)), live)
            call.task.add_done_callback(lambda task: live.end())
            self._calls[asked.name] = call
            self._every.append(call)
        call.num_listeners += 1
        try:
            yield call
        finally:
            call.num_listeners -= 1

    async def answered(self, call: Call) -> Made:
        await asyncio.wait({call.task})
        return self.made(call)

    def made(self, call: Call) -> Made:
        """Return the result of a call that is over, or raise its error."""
        if call.task.cancelled():
            raise over()
        return call.task.result()

    async def generate(
        self,
        token_ids: list[int],
        *,
        policy: str,
        limit: int | None,
        stop: tuple[str, ...],
        on_chunk: OnChunk = ignore_chunk,
    ) -> Turn:
        """Generate a turn after these tokens, no longer than the context allows. Callers can't change how tokens
        are drawn: the run trains on that distribution."""
        room = self._max_context - len(token_ids)
        if room < 1 or not token_ids:
            self.rollout.note_limit()
            raise ApiError(
                f"this model's maximum context length is {self._max_context} tokens, got {len(token_ids)} in the "
                "prompt, which must have at least one and leave room for one; shorten it",
                code="context_length_exceeded",
            )
        if limit is not None and limit < 1:
            raise ApiError(f"max_tokens must be >= 1, got {limit}", param="max_tokens")
        settings = self.rollout.spec.sampling
        changes: dict[str, Any] = {"max_tokens": min(settings.max_tokens, room, limit or room)}
        if stop:
            changes["stop"] = (*settings.stop, *stop)
        try:
            return await self.rollout.generate(token_ids, policy=policy, on_chunk=on_chunk, **changes)
        except EpisodeLimit as error:
            raise ApiError(str(error), code="episode_limit") from error

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Reserve `count` generations, or answer 429 so that the client tries again later."""
        check_generations(count)
        if self._num_generating + count > MAX_GENERATIONS_AT_ONCE:
            raise ApiError(
                f"{self._num_generating} answers of this episode are being made and {count} more are asked for, "
                f"{MAX_GENERATIONS_AT_ONCE} at once is the limit; try again later",
                status=429,
                kind="rate_limit_error",
            )
        self._num_generating += count
        try:
            yield
        finally:
            self._num_generating -= count

    @contextmanager
    def delivering(self, call: Call) -> Iterator[Made]:
        """Add the call's turns to the episode while its answer is sent. This happens before sending, since the
        agent may be done before this process knows that the last byte has left. If sending fails, and no
        other client got the answer, the turns are removed again."""
        made = call.task.result()
        self.rollout.keep(made.turns)
        call.is_kept = True
        try:
            yield made
        except BaseException:
            if not call.is_delivered:
                call.is_kept = False
                self.rollout.forget(made.turns)
            raise
        call.is_delivered = True

    @property
    def num_unread(self) -> int:
        """Return how many calls still run or have an answer that no client has received. Failed calls do not
        count."""
        return sum(not call.is_kept and not _has_failed(call.task) for call in self._every)

    def close(self) -> int:
        """End the episode and cancel its running calls. Idempotent. Return `num_unread` from before."""
        num_unread = self.num_unread
        self._is_over = True
        for call in self._every:
            call.task.cancel()
        self.rollout.close()
        return num_unread

    def _known(self, asked: CallId) -> Call | None:
        call = self._calls.get(asked.name)
        if call is None:
            return None
        left = call.num_listeners == 0 and not call.is_delivered
        return call if asked.is_retry or left else None

    def _check_open(self) -> None:
        if self._is_over:
            raise over()
        running = sum(not call.task.done() for call in self._every)
        if running >= MAX_CALLS_AT_ONCE:
            raise ApiError(
                f"{running} calls of this episode are being answered, {MAX_CALLS_AT_ONCE} is the limit",
                status=429,
                kind="rate_limit_error",
            )

    async def _run(self, asked: CallId, make: Make, live: LiveAnswer) -> Made:
        call = self._calls[asked.name]
        try:
            return await make(live)
        except BaseException:
            if self._calls.get(asked.name) is call:
                del self._calls[asked.name]  # a repeated request makes a new call
            raise


def check_generations(count: int) -> None:
    """Refuse a call that asks for more generations than may ever run at once."""
    if count > MAX_GENERATIONS_AT_ONCE:
        raise ApiError(
            f"a call may ask for {MAX_GENERATIONS_AT_ONCE} answers, got {count} (prompts times n); split it"
        )


def _has_failed(task: "asyncio.Task[Made]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def over() -> ApiError:
    return ApiError(
        "the episode of this key is over", status=401, kind="authentication_error", code="expired_key"
    )


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
        """Close the episode of a key and return its `num_unread`. Return 0 for a key that is unknown or has
        expired."""
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
            "unknown episode key: send the one that the episode was given, as `Authorization: Bearer KEY` "
            "(api_key of OpenAI's client)",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    def of(self, request: web.Request) -> EpisodeSession:
        """Return the session of the key that the request sends as its bearer token."""
        return self.session(bearer_token(request))

    @property
    def num_open(self) -> int:
        return len(self._sessions)
