"""Tracks an unfinished answer: its chunks so far, and the request with which another engine continues it."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.records.base import BoolArray
from penstock.records.generation import Chunk, FinishReason, GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Says how another engine continues an answer."""

    request: GenerateRequest
    again: Sequence[Chunk] = ()
    """Chunks to send first: repeated ones, if chunks after them are lost; or the end, if only that was left."""
    is_void: bool = False
    """Whether everything that was sent is void; then the next chunk must restart the answer."""


class AnswerSoFar:
    """Collects the chunks of one request since its output last began."""

    def __init__(self, request: GenerateRequest, *, records_routing: bool = False) -> None:
        """Start without chunks. `records_routing`: engines record experts for requests that ask for it."""
        self.records_routing = records_routing
        self._request = request
        self.chunks: list[Chunk] = []
        self.is_over = False

    def add(self, chunk: Chunk) -> None:
        if chunk.restarts:
            self.chunks.clear()
            self._request = self._request.from_beginning()
        self.chunks.append(chunk)
        self.is_over = chunk.finish_reason is not None

    def can_resume_after(self, chunk: Chunk) -> bool:
        """Return whether an answer can be continued after this chunk: all recorded data of its tokens has
        arrived."""
        has_mask = chunk.sampling_mask is not None or not self._request.record_sampling_mask
        return has_mask and (chunk.routing is not None or not self._needs_routes)

    def resumable_chunks(self) -> Sequence[Chunk]:
        """Return the first chunks, up to the last after which another engine can continue."""
        ends = [number for number, chunk in enumerate(self.chunks) if self.can_resume_after(chunk)]
        return self.chunks[: ends[-1] + 1] if ends else ()

    def rest(self, chunks: Sequence[Chunk]) -> GenerateRequest:
        """Return the request for what is left after these chunks; without chunks, the request as it was."""
        asked = self._request
        if not chunks:
            return asked
        token_ids = np.concatenate([asked.token_ids, *(chunk.token_ids for chunk in chunks)])
        routing = tuple(c.routing for c in chunks if c.routing is not None) if self._needs_routes else ()
        return msgspec.structs.replace(
            asked,
            token_ids=token_ids.astype(np.int32),
            num_resumed=asked.num_resumed + sum(len(chunk.token_ids) for chunk in chunks),
            routing_start=routing[-1].end if routing else asked.routing_start,
            routing=(*asked.routing, *routing),
            routing_before=asked.routing_before if asked.num_resumed else asked.routing_start,
        )

    def ending(self, chunks: Sequence[Chunk]) -> Chunk | None:
        """Return the final chunk if only the finish reason is missing after these chunks: some engines send it
        separately, after the last token."""
        sampling, empty = self._request.sampling, np.empty(0, dtype=np.int32)
        num_output = self._request.num_resumed + sum(len(chunk.token_ids) for chunk in chunks)
        last = next((int(chunk.token_ids[-1]) for chunk in reversed(chunks) if len(chunk.token_ids)), None)
        reason: FinishReason | None = "length" if num_output >= sampling.max_tokens else None
        if last in sampling.stop_token_ids and num_output >= sampling.min_tokens:
            reason = "stop"
        if reason is None:
            return None
        return Chunk(token_ids=empty, logprobs=empty.astype(np.float32), versions=empty, finish_reason=reason)

    def hand_on(self, *, resumes: bool) -> Continuation:
        """Return how another engine continues. With `resumes` an answer may continue after its first tokens;
        otherwise it restarts."""
        whole = self.resumable_chunks() if resumes else ()
        end = self.ending(whole)
        ending = () if end is None else (end,)
        if resumes and len(whole) == len(self.chunks):
            return Continuation(request=self._request if ending else self.rest(whole), again=ending)
        if whole and not self._request.num_resumed:
            again = [msgspec.structs.replace(whole[0], restarts=True), *whole[1:], *ending]
            return Continuation(request=self._request if ending else self.rest(whole), again=again)
        is_void = bool(self.chunks) or self._request.num_resumed > 0
        return Continuation(request=self._request.from_beginning(), is_void=is_void)

    @property
    def _needs_routes(self) -> bool:
        return self.records_routing and self._request.record_routing


def joined_chunk(chunks: Sequence[Chunk]) -> Chunk:
    """Join consecutive chunks into one. Only the last may refer to recorded data or end the answer, and only the
    first may restart it."""
    if len(chunks) == 1:
        return chunks[0]
    return msgspec.structs.replace(
        chunks[-1],
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        mixed=_joined_mixed(chunks),
        restarts=chunks[0].restarts,
    )


def _joined_mixed(chunks: Sequence[Chunk]) -> BoolArray | None:
    """Join the `mixed` of the chunks; return None if any chunk with tokens has none."""
    parts = [chunk.mixed for chunk in chunks if len(chunk.token_ids)]
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known and len(known) == len(parts) else None
