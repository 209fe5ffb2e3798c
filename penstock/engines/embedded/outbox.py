"""Appends drawn tokens to their sequence, up to where it ends, and sends them in chunks to the request's stream."""

import asyncio
from collections import deque
from math import isfinite

import numpy as np

from penstock.engines.embedded.route_store import BlockRoutes
from penstock.engines.embedded.scheduler import Scheduler
from penstock.engines.embedded.sequence import Sequence
from penstock.errors import BlobLost, NonFiniteLogits
from penstock.records import Chunk, FinishReason, MaskRef, RoutingRef, joined_chunk
from penstock.records.interfaces import BlobStore, Tokenizer
from penstock.records.routing_records import store_routes
from penstock.records.sampling_masks import Packed, first_tokens, join_packed, store_mask


class Outbox:
    """Holds the streams of all requests, by id."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        blobs: BlobStore,
        routes: BlockRoutes | None = None,
    ) -> None:
        """`routes` has the chosen experts, if the engine records them."""
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._blobs = blobs
        self._routes = routes
        self.vocab_size = vocab_size
        self.streams: dict[str, Stream] = {}
        self.num_tokens = 0
        self.num_nonfinite = 0
        """Requests whose logits were not finite."""
        self._broken: set[str] = set()

    def take(
        self,
        seq: Sequence,
        tokens: list[int],
        logprobs: list[float],
        versions: list[int],
        masks: Packed | None = None,
    ) -> FinishReason | None:
        """Add drawn tokens to a sequence, up to where it ends; return why it ends, or None. A logprob that is not
        finite comes from logits that are not: then no token is added, and the request fails."""
        count, reason = end_within(seq, tokens, self._tokenizer)
        if not isfinite(sum(logprobs[:count])):
            self._broken.add(seq.request.id)
            self.num_nonfinite += 1
            return "cancelled"
        seq.tokens.extend(tokens[:count])
        seq.logprobs.extend(logprobs[:count])
        seq.versions.extend(versions[:count])
        seq.mixed.extend(version != seq.kv_version for version in versions[:count])
        if masks is not None:
            seq.masks.append(first_tokens(masks, count, self.vocab_size))
        self.num_tokens += count
        return reason

    def send(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Send a chunk if the sequence has ended or has enough tokens for one. A sequence that has ended leaves
        the batch."""
        if reason is None and seq.num_output - seq.num_sent < seq.request.chunk_tokens:
            return
        stream = self.streams[seq.request.id]
        if seq.request.id in self._broken:
            self._broken.discard(seq.request.id)
            stream.fail(_nonfinite(seq))
        else:
            try:
                stream.put(cut_chunk(seq, reason, *self._record(seq, reason)))
            except BlobLost as error:  # costs this request, not the engine
                stream.fail(error)
        if reason == "cancelled":
            self._scheduler.cancel(seq)
        elif reason is not None:
            self._scheduler.finish(seq)

    def refuse(self, seq: Sequence, error: BaseException) -> None:
        """End one request with this error."""
        self.streams[seq.request.id].fail(error)
        self._scheduler.cancel(seq)

    def fail(self, error: BaseException) -> None:
        for stream in self.streams.values():
            stream.fail(error)

    def _record(self, seq: Sequence, reason: FinishReason | None) -> tuple[MaskRef | None, RoutingRef | None]:
        """Store masks and routes at the end of a sequence, and once `record_every` tokens have come since the last
        time."""
        if reason is None and not 0 < seq.request.record_every <= seq.num_output - seq.num_recorded:
            return None, None
        mask, routing = self._store_mask(seq), self._store_routes(seq)
        seq.num_recorded = seq.num_output
        return mask, routing

    def _store_mask(self, seq: Sequence) -> MaskRef | None:
        """Store all masks that are not stored yet as one blob: most masks are small, and files are not free."""
        if not seq.request.record_sampling_mask:
            return None
        masks, seq.masks = seq.masks, []
        mask = join_packed(masks, self.vocab_size)
        return store_mask(self._blobs, _key(seq, "mask"), mask, start=seq.num_recorded)

    def _store_routes(self, seq: Sequence) -> RoutingRef | None:
        """Store the rows that the client does not have yet. The newest token's row is not computed yet, or still
        in flight."""
        if self._routes is None or not seq.request.record_routing:
            return None
        start = seq.num_routed
        rows = self._routes.of(seq, start, seq.num_tokens - 1)
        if not len(rows):
            return None
        seq.num_routed = start + len(rows)
        return store_routes(self._blobs, _key(seq, "routes"), rows, self._routes.shape, start=start)


def _key(seq: Sequence, kind: str) -> str:
    """Return a blob key that differs for every piece of a request."""
    piece = f".{seq.num_recorded}" if seq.num_recorded else ""
    return f"{seq.request.blob_scope}/{seq.request.id}{piece}.{kind}"


def _nonfinite(seq: Sequence) -> NonFiniteLogits:
    return NonFiniteLogits(
        f"request {seq.request.id!r} failed after {seq.num_output} tokens: the model's logits are not finite. The "
        "weights have diverged, or the number format overflows: try engine.dtype=bfloat16 instead of float16"
    )


UNREAD = 64
"""Unread chunks are joined by this many: a slow client costs memory for its tokens, not for records."""


class Stream:
    """Carries chunks to the one task that iterates a request."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._num_joinable = 0
        """How many of the last chunks may be joined into one."""
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
    return (chunk.finish_reason, chunk.sampling_mask, chunk.routing, chunk.restarts) == (
        None,
        None,
        None,
        False,
    )


def _join(chunks: list[Chunk]) -> Chunk:
    return joined_chunk(chunks)


def finish_reason(seq: Sequence, tokenizer: Tokenizer | None) -> FinishReason | None:
    """Return why the newest token ends the sequence, or None. A stop token, and the token whose text completes a
    stop string, stay in the output: the policy sampled them."""
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
    """Return how many of the tokens drawn after `seq` belong to it, and why it ends there, or None."""
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
    """Make a chunk of what has been drawn since the last one."""
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
    """Return whether the newest token's text completes one of `stops`.

    Only the tail is decoded: at least as many characters as the longest stop string has, or the whole output.
    """
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
