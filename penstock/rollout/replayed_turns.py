"""Logs turns while engines sample them, so that they survive a restart of the process.

    request ─► tokens known from the log ─► an engine continues after them ─► chunks
                                                        └► parts, to the log

So a workflow that runs again gets its finished turns at once, and the turn under way continues where it was.
A request must match what was logged for this turn: its prompt, policy and sampling. Otherwise the workflow
has diverged; that is counted, and the turn is generated afresh.
"""

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from penstock.records import (
    AnswerSoFar,
    Chunk,
    GenerateRequest,
    PartialGroup,
    TurnPart,
    WorkProgressed,
    joined_chunk,
)
from penstock.rollout.episode_rollout import TokenSource
from penstock.rollout.episode_spec import place_of


class WorkLog(Protocol):
    """Takes records of unfinished work. Callers do not wait until they are written."""

    def append(self, record: WorkProgressed) -> object: ...


class ReplayedTurns:
    """Wraps engines as a `TokenSource` that logs and replays turns. Requests of evaluations pass through."""

    def __init__(
        self,
        engine: TokenSource,
        log: WorkLog,
        *,
        known: Mapping[int, PartialGroup] | None = None,
        resumes: bool = True,
        records_routing: bool = False,
        record_every: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Log turns to `log`, and replay those in `known`: what each group, by number, had done before a
        restart. With `resumes`, an unfinished answer continues, perhaps under newer weights; otherwise it
        starts over. `records_routing` says whether the run records routes. `record_every` is the number of
        tokens between two stored pieces of masks and routes."""
        self._engine = engine
        self._log = log
        self._known = {number: dict(group.turns) for number, group in (known or {}).items()}
        self._resumes = resumes
        self._records_routing = records_routing
        self._record_every = record_every
        self._say = say
        self.counts: Counter[str] = Counter()
        """`resumed_turns`, `resumed_tokens` and `diverged_turns`."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        place = place_of(request.id)
        if place is None:
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
            return
        request = msgspec.structs.replace(request, record_every=self._record_every)
        turn = _KeptTurn(self._log, request, place, records_routing=self._records_routing)
        for chunk in self._known_chunks(turn, place):
            turn.answer.add(chunk)
            yield chunk
        if turn.answer.is_over:
            return
        end = turn.answer.ending(turn.answer.chunks)
        if end is not None:
            yield end
            return
        async with aclosing(self._engine.generate(turn.begin())) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                turn.take(chunk)
                yield chunk

    def _known_chunks(self, turn: "_KeptTurn", place: tuple[int, int, int]) -> Sequence[Chunk]:
        """Take a turn's logged chunks out of `known`: each turn is asked for once. Return none if they can't be
        used."""
        group, episode, number = place
        parts = self._known.get(group, {}).pop((episode, number), [])
        if not parts:
            return ()
        if parts[0].key != turn.key:
            if not self.counts["diverged_turns"]:
                self._say(
                    f"turn {number} of episode g{group}.{episode} has another prompt than before the restart: the "
                    "workflow diverged, and the turn is generated afresh"
                )
            self.counts["diverged_turns"] += 1
            return ()
        is_whole = parts[-1].chunk.finish_reason is not None
        if not (is_whole or self._resumes):
            return ()
        self.counts["resumed_turns"] += 1
        self.counts["resumed_tokens"] += parts[-1].end
        return [part.chunk for part in parts]


class _KeptTurn:
    def __init__(
        self,
        log: WorkLog,
        request: GenerateRequest,
        place: tuple[int, int, int],
        *,
        records_routing: bool,
    ) -> None:
        self.key = key_of(request)
        self.answer = AnswerSoFar(request, records_routing=records_routing)
        self._log = log
        self._place = place
        self._policy = request.policy
        self._num_kept = 0
        self._waiting: list[Chunk] = []
        """Chunks whose recorded data has not arrived yet: no engine could continue after them."""

    def begin(self) -> GenerateRequest:
        """Return the request for what is left after the known chunks."""
        self._num_kept = sum(len(chunk.token_ids) for chunk in self.answer.chunks)
        return self.answer.rest(self.answer.chunks)

    def take(self, chunk: Chunk) -> None:
        if chunk.restarts:
            self._waiting.clear()
            self._num_kept = 0
        self.answer.add(chunk)
        self._waiting.append(chunk)
        if chunk.finish_reason == "cancelled" or not self.answer.can_resume_after(chunk):
            return
        group, episode, turn = self._place
        kept = joined_chunk(self._waiting)
        if kept.restarts:
            kept = msgspec.structs.replace(kept, restarts=False)
        self._waiting.clear()
        part = TurnPart(
            group=group,
            episode=episode,
            turn=turn,
            policy=self._policy,
            key=self.key,
            start=self._num_kept,
            chunk=kept,
        )
        self._num_kept = part.end
        self._log.append(WorkProgressed(turns=(part,)))


def key_of(request: GenerateRequest) -> bytes:
    """Return a digest that is equal for requests that ask for the same."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(request.token_ids[: request.num_prompt].tobytes())
    digest.update(msgspec.msgpack.encode((request.policy, request.sampling)))
    return digest.digest()
