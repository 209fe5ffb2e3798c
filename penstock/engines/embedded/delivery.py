"""From drawn tokens to what the caller sees: when a request ends, and chunks of its output."""

import asyncio
from collections import deque

import numpy as np

from penstock.engines.embedded.sequence import Sequence
from penstock.interfaces import Tokenizer
from penstock.types import Chunk, FinishReason, MaskRef, RoutingRef, joined_chunk

UNREAD = 64
"""Chunks that nobody reads are joined by so many: a slow client costs memory for its tokens, not for records."""


class Stream:
    """Chunks on their way to the one task that iterates a request."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._num_joinable = 0
        """Of the last chunks, those that may become one."""
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._num_joinable = self._num_joinable + 1 if _is_plain(chunk) else 0
        if self._num_joinable == UNREAD:
            last = [self._chunks.pop() for _ in range(UNREAD)]
            self._chunks.append(_join(last[::-1]))
            self._num_joinable = 0
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()

    async def next(self) -> Chunk:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        chunk = self._chunks.popleft()
        self._num_joinable = min(self._num_joinable, len(self._chunks))
        return chunk


def _is_plain(chunk: Chunk) -> bool:
    """Whether it has nothing but tokens."""
    return (chunk.finish_reason, chunk.sampling_mask, chunk.routing, chunk.restarts) == (
        None,
        None,
        None,
        False,
    )


def _join(chunks: list[Chunk]) -> Chunk:
    return joined_chunk(chunks)


def finish_reason(seq: Sequence, tokenizer: Tokenizer | None) -> FinishReason | None:
    """Whether its newest token ends a sequence. A stop token, and the token whose text completes a stop
    string, stay in the output: the policy sampled them."""
    sampling = seq.request.sampling
    if seq.num_output >= sampling.min_tokens:
        if seq.tokens[-1] in sampling.stop_token_ids:
            return "stop"
        if sampling.stop and tokenizer is not None and _completes(seq, sampling.stop, tokenizer):
            return "stop"
    return "length" if seq.num_tokens >= seq.limit else None


def end_within(
    seq: Sequence, tokens: list[int], tokenizer: Tokenizer | None
) -> tuple[int, FinishReason | None]:
    """How many of the tokens drawn after `seq` belong to it, and why it ends there, if it does."""
    sampling = seq.request.sampling
    room = seq.limit - seq.num_tokens
    plain = not sampling.stop and sampling.min_tokens == 0
    if plain and (not sampling.stop_token_ids or set(sampling.stop_token_ids).isdisjoint(tokens)):
        return (room, "length") if room <= len(tokens) else (len(tokens), None)
    start = len(seq.tokens)
    try:
        for count, token in enumerate(tokens, start=1):
            seq.tokens.append(token)
            reason = finish_reason(seq, tokenizer)
            if reason is not None:
                return count, reason
        return len(tokens), None
    finally:
        del seq.tokens[start:]


def cut_chunk(
    seq: Sequence,
    reason: FinishReason | None,
    mask: MaskRef | None = None,
    routing: RoutingRef | None = None,
) -> Chunk:
    """What has been drawn since the last chunk."""
    start, seq.num_sent = seq.num_sent, seq.num_output
    restarts, seq.restarts = seq.restarts, False
    return Chunk(
        token_ids=np.array(seq.tokens[seq.num_prompt + start :], dtype=np.int32),
        logprobs=np.array(seq.logprobs[start:], dtype=np.float32),
        versions=np.array(seq.versions[start:], dtype=np.int32),
        mixed=np.array(seq.mixed[start:], dtype=np.bool_),
        finish_reason=reason,
        sampling_mask=mask,
        routing=routing,
        restarts=restarts,
    )


def _completes(seq: Sequence, stops: tuple[str, ...], tokenizer: Tokenizer) -> bool:
    """Whether the newest token's text completes one of `stops`.

    Decodes the tail only: at least as many characters as the longest stop string has, or all there is."""
    output = seq.tokens[seq.num_prompt :]
    longest = max(len(stop) for stop in stops)
    width = longest + 4
    while True:
        tail = output[-width:]
        text = tokenizer.decode(tail)
        if len(text) >= longest + 4 or len(tail) == len(output):
            break
        width *= 2
    before = tokenizer.decode(tail[:-1]) if len(tail) > 1 else ""
    common = next((at for at, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), None)
    if common is None:
        common = min(len(before), len(text))
    return any(stop in text[max(0, common - len(stop) + 1) :] for stop in stops)
