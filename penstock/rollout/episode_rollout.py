"""Gives a workflow its engine, its tokenizer, and its own seed and request id for every turn.

Contexts are token ids. Text becomes ids once, when it is rendered or appended. Sampled tokens stay as they
were sampled, so the trainer sees the very tokens that the engine drew.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.errors import RequestRefused
from penstock.records import (
    DEFAULT_POLICY,
    Chunk,
    FinishReason,
    GenerateRequest,
    IntArray,
    Message,
    Parent,
    RoutingRef,
    SamplingParams,
    Task,
    Turn,
    group_scope,
    since_restart,
)
from penstock.records.answers import joined_chunk
from penstock.records.blobs import routes_within
from penstock.records.interfaces import Tokenizer
from penstock.rollout.episode_record import EpisodeRecord, turn_number
from penstock.rollout.episode_spec import EpisodeSpec, check_replayed
from penstock.rollout.replayed_calls import KeepCall, ReplayedCalls, keep_nothing


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an address that serves OpenAI's API for one episode."""

    base_url: str
    """The `base_url` of OpenAI's client."""
    api_key: str
    """The key of the episode: it gives access until the episode is over."""
    model: str
    """A name under which the address serves the policy."""

    @property
    def episode_url(self) -> str:
        """Return the address of the episode itself: `GET` gives the task, `POST …/reward` takes the reward."""
        return f"{self.base_url.removesuffix('/v1')}/episodes/{self.api_key}"


Messages = Sequence[Message | Mapping[str, str]]
Context = str | Messages | Sequence[int] | IntArray
"""Text, chat messages or token ids."""


OnChunk = Callable[[Chunk], None]


def ignore_chunk(chunk: Chunk) -> None:
    """Ignore the chunk, for callers that want whole turns only."""


class TokenSource(Protocol):
    """Generates tokens: all that a rollout needs of an engine."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...


class Rollout:
    """Gives one episode access to the run. `tokenizer` is the model's, and `spec` says which attempt of which group
    it is. Turns may be generated one after another or at once; they are numbered in the order of the calls."""

    def __init__(
        self,
        spec: EpisodeSpec,
        engine: TokenSource,
        tokenizer: Tokenizer,
        keep_call: KeepCall = keep_nothing,
        *,
        record: EpisodeRecord | None = None,
        keeps: bool = True,
    ) -> None:
        """Set up the episode's access; `keep_call` stores the results of calls, so that a restart need not
        repeat them."""
        self.spec = spec
        self.tokenizer = tokenizer
        self._engine = engine
        self._calls = ReplayedCalls(spec, keep_call)
        self._earlier = {turn_number(turn): turn for turn in spec.turns}
        self._record = record or EpisodeRecord(spec)
        self._keeps = keeps
        self._generating: set[asyncio.Task[Any]] = set()
        self._over = False
        self._endpoint: Endpoint | None = None

    def twin(self, engine: TokenSource) -> "Rollout":
        """Return a rollout of the same episode for another event loop, with that loop's engine. Both share
        limits and turn numbers. A turn of the twin becomes part of the episode only through `keep`."""
        return Rollout(self.spec, engine, self.tokenizer, record=self._record, keeps=False)

    @property
    def engine_error(self) -> Exception | None:
        """Return what an engine raised, refusals aside: the run must know, whatever the workflow does with the
        error."""
        return self._record.engine_error

    @property
    def endpoint(self) -> Endpoint:
        """Return the address of this episode's own OpenAI API, with its key. Only rollout workers have one."""
        if self._endpoint is None:
            raise RuntimeError(
                "rollout.endpoint needs a process of its own; set rollout.workers to 1 or more"
            )
        return self._endpoint

    @endpoint.setter
    def endpoint(self, endpoint: Endpoint) -> None:
        """Set the address; called by the process that listens there."""
        self._endpoint = endpoint

    @property
    def rewrites(self) -> dict[str, int]:
        """Return how often earlier messages were rewritten, by `client` or by `template`."""
        return dict(self._record.rewrites)

    def note_rewrite(self, who: str) -> None:
        """Count that `who` has rewritten earlier messages: `client` or `template`."""
        self._record.rewrites[who] = self._record.rewrites.get(who, 0) + 1

    @property
    def has_begun(self) -> bool:
        """Return whether the episode has asked for a turn."""
        return self._record.num_begun > 0

    @property
    def is_limited(self) -> bool:
        """Return whether the episode has asked for more turns or tokens than it may have."""
        return self._record.is_limited

    def note_limit(self) -> None:
        """Record that the episode has asked for more turns or tokens than it may have."""
        self._record.is_limited = True

    @property
    def reward(self) -> float | None:
        """Return the reward that the workflow or agent has set, if any."""
        return self._record.reward

    @property
    def parts(self) -> dict[str, float]:
        """Return the named parts of that reward."""
        return self._record.parts

    def set_reward(self, value: float, parts: Mapping[str, float] | None = None) -> None:
        """Set the episode's reward, which must be finite in float32. A later call replaces it."""
        self._record.set_reward(value, parts or {})

    def keep(self, turns: Iterable[Turn]) -> None:
        """Make turns of a twin part of the episode, because a client is about to get them."""
        self._record.turns.update((turn_number(turn), turn) for turn in turns)

    def forget(self, turns: Iterable[Turn]) -> None:
        """Remove turns that the client has not received."""
        for turn in turns:
            self._record.turns.pop(turn_number(turn), None)

    @property
    def task(self) -> Task:
        """Return the task that the episode attempts."""
        return self.spec.task

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return the finished turns, in the order in which they were begun."""
        return self._record.in_order()

    def render(self, messages: str | Messages) -> list[int]:
        """Tokenise a prompt: chat messages through the model's template, ready for an answer; plain text as it
        is."""
        prompt = messages if isinstance(messages, str) else _messages(messages)
        return self.tokenizer.encode_prompt(prompt)

    def continue_(self, turn: Turn, addition: str | Messages) -> list[int]:
        """Return the context after `turn`: its tokens unchanged, then the addition. Text is appended as it is;
        messages as the chat template puts them between two answers."""
        if isinstance(addition, str):
            added = self.tokenizer.encode(addition)
        else:
            last = int(turn.output_ids[-1]) if len(turn.output_ids) else None
            added = self.tokenizer.encode_reply(_messages(addition), after=last)
        return [*turn.token_ids.tolist(), *added]

    async def generate(
        self,
        context: Context,
        *,
        policy: str | None = None,
        parent: Turn | None = None,
        on_chunk: OnChunk = ignore_chunk,
        **sampling: Any,
    ) -> Turn:
        """Generate one turn after `context`. `parent` is an earlier turn with the same beginning, whose cache
        the engine can reuse; unset takes the longest turn that `context` continues. `on_chunk` is called with
        each chunk as it is sampled. `sampling` overrides fields of `SamplingParams`, such as `max_tokens` or
        `temperature`."""
        if self._over:
            raise RuntimeError(f"episode {self.spec.name} is over: it can't generate any more")
        policy = policy or DEFAULT_POLICY
        token_ids = self._token_ids(context)
        number, settings = self._record.begin_turn(sampling, trains=policy == DEFAULT_POLICY)
        if policy == DEFAULT_POLICY and not self.spec.is_evaluation:
            check_replayed(settings)
        again = self._earlier.get(number)
        if again is not None and _asks_the_same(again, token_ids, settings, policy):
            on_chunk(_whole(again))
            return self._done(number, settings, again)
        earlier = parent if parent is not None else self._continued(token_ids, policy)
        request = self._request(number, token_ids, settings, policy, earlier)
        come: list[Chunk] = []
        try:
            with self._asking_engine():
                async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        come.append(chunk)
                        on_chunk(chunk)
            turn = self._turn_of(request, earlier, since_restart(come))
        except BaseException:
            self._record.give_back(settings.max_tokens)
            raise
        return self._done(number, settings, turn)

    def _request(
        self, number: int, token_ids: IntArray, settings: SamplingParams, policy: str, earlier: Turn | None
    ) -> GenerateRequest:
        known = _known_routes(earlier, token_ids, policy)
        return GenerateRequest(
            id=self.spec.turn_id(number),
            token_ids=token_ids,
            sampling=settings,
            policy=policy,
            parent=_fork(earlier, token_ids),
            priority=self.spec.group,
            chunk_tokens=self.spec.chunk_tokens,
            record_sampling_mask=settings.truncates and not self.spec.is_evaluation,
            record_routing=policy == DEFAULT_POLICY and not self.spec.is_evaluation,
            routing_start=known[-1].end if known else 0,
            routing=known,
            blob_scope=group_scope(self.spec.group),
        )

    @contextmanager
    def _asking_engine(self) -> Iterator[None]:
        """Track the current task, so that `close` can cancel it. Record engine errors other than refusals, for
        the run to see."""
        task = asyncio.current_task()
        assert task is not None
        self._generating.add(task)
        try:
            yield
        except RequestRefused:
            raise
        except Exception as error:
            self._record.engine_error = error
            raise
        finally:
            self._generating.discard(task)

    def _done(self, number: int, settings: SamplingParams, turn: Turn) -> Turn:
        self._record.give_back(settings.max_tokens - len(turn.output_ids))
        if self._keeps:
            self._record.turns[number] = turn
        return turn

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call `function` with these arguments, await the result if needed, and return it: for tools and
        environments. A training workflow that runs again after a restart gets the earlier result without the call.
        So a result must be JSON (lists, dicts, strings, numbers), and is returned as JSON decodes it."""
        return await self._calls.call(function, arguments, named)

    def close(self) -> None:
        """End the episode: cancel turns that are being generated, and refuse new ones."""
        self._over = True
        for task in self._generating:
            task.cancel()

    def _turn_of(self, request: GenerateRequest, parent: Turn | None, chunks: Sequence[Chunk]) -> Turn:
        """Make a turn of its chunks. Where sampling truncates the distribution, the kept tokens are recorded
        too: without them the trainer's ratios would be biased."""
        finish_reason = _finish_reason(chunks)
        whole = joined_chunk(chunks)
        return Turn(
            id=request.id,
            parent=parent.id if parent is not None else None,
            prompt_ids=request.token_ids,
            output_ids=whole.token_ids,
            logprobs=whole.logprobs,
            versions=whole.versions,
            mixed=whole.mixed,
            finish_reason=finish_reason,
            sampling=request.sampling,
            text=self.tokenizer.decode(whole.token_ids.tolist()),
            policy=request.policy,
            sampling_masks=tuple(c.sampling_mask for c in chunks if c.sampling_mask is not None),
            routing=(*request.routing, *(chunk.routing for chunk in chunks if chunk.routing is not None)),
        )

    def _token_ids(self, context: Context) -> IntArray:
        if isinstance(context, str) or (len(context) and isinstance(context[0], Message | Mapping)):
            context = self.render(context)  # type: ignore[arg-type]
        return np.asarray(context, dtype=np.int32)

    def _continued(self, token_ids: IntArray, policy: str) -> Turn | None:
        """Return the longest turn of the policy whose tokens are a prefix of `token_ids`."""
        if not self._record.turns:
            return None
        found = [
            turn
            for turn in self.turns
            if turn.policy == policy and _common(turn.token_ids, token_ids) == len(turn.token_ids)
        ]
        return max(found, key=lambda turn: len(turn.token_ids), default=None)


def _messages(messages: Messages) -> tuple[Message, ...]:
    return tuple(
        message if isinstance(message, Message) else Message(role=message["role"], content=message["content"])
        for message in messages
    )


def _whole(turn: Turn) -> Chunk:
    """Return the output of a turn as one chunk."""
    return Chunk(
        token_ids=turn.output_ids,
        logprobs=turn.logprobs,
        versions=turn.versions,
        mixed=turn.mixed,
        finish_reason=turn.finish_reason,
    )


def _asks_the_same(turn: Turn, token_ids: IntArray, settings: SamplingParams, policy: str) -> bool:
    return turn.policy == policy and turn.sampling == settings and np.array_equal(turn.prompt_ids, token_ids)


def _fork(parent: Turn | None, token_ids: IntArray) -> Parent | None:
    """Refer to as much of the parent's cache as matches these tokens."""
    keep = _common(parent.token_ids, token_ids) if parent is not None else 0
    return Parent(id=parent.id, keep=keep) if parent is not None and keep else None


def _known_routes(earlier: Turn | None, token_ids: IntArray, policy: str) -> tuple[RoutingRef, ...]:
    """Return an earlier turn's routes for the tokens that both share at the beginning: these need not be sent
    again. The last token is always computed anew, since the answer is drawn from it."""
    if earlier is None or earlier.policy != policy:
        return ()
    return routes_within(earlier.routing, 0, min(_common(earlier.token_ids, token_ids), len(token_ids) - 1))


def _common(one: IntArray, other: IntArray) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size


def _finish_reason(chunks: Sequence[Chunk]) -> FinishReason:
    reason = chunks[-1].finish_reason if chunks else None
    if reason is None:
        raise RuntimeError("an engine ended a generation without a finish reason")
    return reason
