"""What a workflow is given: an engine, a tokenizer, and numbers of its own for every turn.

Contexts are token ids. Text becomes ids once, when it is rendered or appended; what was sampled stays as it was
sampled, so that the trainer sees the very tokens that the engine drew.
"""

import asyncio
import difflib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.errors import RequestRefused
from penstock.interfaces import Tokenizer
from penstock.rollout.episode_spec import EpisodeSpec
from penstock.rollout.replay_check import check_replayed
from penstock.types import (
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
from penstock.types.blobs import routes_within

Messages = Sequence[Message | Mapping[str, str]]
Context = str | Messages | Sequence[int] | IntArray
"""Text, chat messages or token ids."""


class TokenSource(Protocol):
    """All that a rollout needs of an engine."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...


class Rollout:
    """One episode's access to the run: `tokenizer` is the model's, `spec` says which attempt of which group it is.
    Turns may be asked for one after the other or at once; they are numbered in the order in which they were asked
    for."""

    def __init__(self, spec: EpisodeSpec, engine: TokenSource, tokenizer: Tokenizer) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self._engine = engine
        self._num_begun = 0
        self._turns: dict[int, Turn] = {}
        self._generating: set[asyncio.Task[Any]] = set()
        self._over = False
        self.engine_error: Exception | None = None
        """What an engine raised other than a refusal: the run must know, whatever the workflow does with it."""

    @property
    def task(self) -> Task:
        """What is attempted."""
        return self.spec.task

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that are finished, in the order in which they were begun."""
        return tuple(self._turns[number] for number in sorted(self._turns))

    def render(self, messages: str | Messages) -> list[int]:
        """Chat messages through the model's template, opened for its answer; plain text as the tokenizer has it."""
        prompt = messages if isinstance(messages, str) else _messages(messages)
        return self.tokenizer.encode_prompt(prompt)

    def continue_(self, turn: Turn, addition: str | Messages) -> list[int]:
        """The context after `turn`: its tokens as they are, then the addition. Text is appended as it is; messages
        as the chat template puts them between two answers."""
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
        **sampling: Any,
    ) -> Turn:
        """One turn after `context`. `parent` is an earlier turn that begins alike, whose cache the engine can go on
        from; without one, the longest turn that `context` continues is taken. `sampling` overrides fields of
        `SamplingParams`, such as `max_tokens` or `temperature`."""
        if self._over:
            raise RuntimeError(f"episode {self.spec.name} is over: it can't generate any more")
        policy = policy or DEFAULT_POLICY
        number, self._num_begun = self._num_begun, self._num_begun + 1
        token_ids = self._token_ids(context)
        settings = _overridden(self.spec.turn_sampling(number), sampling, trains=policy == DEFAULT_POLICY)
        if policy == DEFAULT_POLICY and not self.spec.is_evaluation:
            check_replayed(settings)
        earlier = parent if parent is not None else self._continued(token_ids, policy)
        known = _known_routes(earlier, token_ids, policy)
        request = GenerateRequest(
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
            blob_scope=group_scope(self.spec.group),
        )
        turn = self._turn_of(request, earlier, await self._chunks(request), known)
        self._turns[number] = turn
        return turn

    def close(self) -> None:
        """The episode is over: turns that are still being made are cancelled, and no new one begins."""
        self._over = True
        for task in self._generating:
            task.cancel()

    async def _chunks(self, request: GenerateRequest) -> Sequence[Chunk]:
        task = asyncio.current_task()
        assert task is not None
        self._generating.add(task)
        try:
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                return since_restart([chunk async for chunk in chunks])
        except RequestRefused:
            raise
        except Exception as error:
            self.engine_error = error
            raise
        finally:
            self._generating.discard(task)

    def _turn_of(
        self,
        request: GenerateRequest,
        parent: Turn | None,
        chunks: Sequence[Chunk],
        known: tuple[RoutingRef, ...],
    ) -> Turn:
        """Where truncation cuts the distribution, what was kept is recorded too: without it the trainer's ratios
        would be biased."""
        finish_reason = _finish_reason(chunks)
        output_ids = np.concatenate([chunk.token_ids for chunk in chunks])
        return Turn(
            id=request.id,
            parent=parent.id if parent is not None else None,
            prompt_ids=request.token_ids,
            output_ids=output_ids,
            logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
            versions=np.concatenate([chunk.versions for chunk in chunks]),
            finish_reason=finish_reason,
            sampling=request.sampling,
            text=self.tokenizer.decode(output_ids.tolist()),
            policy=request.policy,
            sampling_masks=tuple(c.sampling_mask for c in chunks if c.sampling_mask is not None),
            routing=(*known, *(chunk.routing for chunk in chunks if chunk.routing is not None)),
        )

    def _token_ids(self, context: Context) -> IntArray:
        if isinstance(context, str) or (len(context) and isinstance(context[0], Message | Mapping)):
            context = self.render(context)  # type: ignore[arg-type]
        return np.asarray(context, dtype=np.int32)

    def _continued(self, token_ids: IntArray, policy: str) -> Turn | None:
        """The longest turn of the policy whose tokens `token_ids` begins with."""
        found = [
            turn
            for turn in self._turns.values()
            if turn.policy == policy and _common(turn.token_ids, token_ids) == len(turn.token_ids)
        ]
        return max(found, key=lambda turn: len(turn.token_ids), default=None)


def _messages(messages: Messages) -> tuple[Message, ...]:
    return tuple(
        message if isinstance(message, Message) else Message(role=message["role"], content=message["content"])
        for message in messages
    )


def _overridden(settings: SamplingParams, changes: Mapping[str, Any], *, trains: bool) -> SamplingParams:
    known = SamplingParams.__struct_fields__
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they are: {', '.join(known)}"
            raise TypeError(f"generate has no sampling setting {name!r}; {hint}")
    if trains and settings.temperature > 0 and changes.get("temperature") == 0:
        raise ValueError(
            "temperature must be > 0, got 0: greedy tokens have no distribution to train on; 0 is for evaluation "
            "(eval.temperature) and for other policies"
        )
    return msgspec.structs.replace(settings, **changes) if changes else settings


def _fork(parent: Turn | None, token_ids: IntArray) -> Parent | None:
    """As much of the parent's cache as is right for these tokens."""
    keep = _common(parent.token_ids, token_ids) if parent is not None else 0
    return Parent(id=parent.id, keep=keep) if parent is not None and keep else None


def _known_routes(earlier: Turn | None, token_ids: IntArray, policy: str) -> tuple[RoutingRef, ...]:
    """The routes of an earlier turn for the tokens that both begin with: those need not be sent again."""
    if earlier is None or earlier.policy != policy:
        return ()
    return routes_within(earlier.routing, 0, _common(earlier.token_ids, token_ids))


def _common(one: IntArray, other: IntArray) -> int:
    """How many tokens both begin with."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size


def _finish_reason(chunks: Sequence[Chunk]) -> FinishReason:
    reason = chunks[-1].finish_reason if chunks else None
    if reason is None:
        raise RuntimeError("an engine ended a generation without a finish reason")
    return reason
