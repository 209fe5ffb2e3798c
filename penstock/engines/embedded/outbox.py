"""Where drawn tokens go: onto their sequence, and out in chunks to whoever asked for them."""

from math import isfinite

from penstock.engines.embedded.delivery import Stream, cut_chunk, end_within
from penstock.engines.embedded.route_store import BlockRoutes
from penstock.engines.embedded.scheduler import Scheduler
from penstock.engines.embedded.sequence import Sequence
from penstock.errors import BlobLost, NonFiniteLogits
from penstock.interfaces import BlobStore, Tokenizer
from penstock.routing_records import store_routes
from penstock.sampling_masks import Packed, first_tokens, join_packed, store_mask
from penstock.types import FinishReason, MaskRef, RoutingRef


class Outbox:
    """The streams of all requests, by id."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        blobs: BlobStore,
        routes: BlockRoutes | None = None,
    ) -> None:
        """`routes` is where the chosen experts are, of an engine that records them."""
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
        """Add what was drawn for a sequence, up to where it ends; says why, if it does. A logprob that is not
        finite comes from logits that are not: the request ends there, and fails."""
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

    def send_due(self, seq: Sequence, reason: FinishReason | None) -> None:
        """A chunk, if the sequence has ended or has enough tokens for one."""
        if reason is not None:
            self.end(seq, reason)
        elif seq.num_output - seq.num_sent >= seq.request.chunk_tokens:
            self._send(seq, None)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.request.id in self._broken:
            self._broken.discard(seq.request.id)
            self.streams[seq.request.id].fail(_nonfinite(seq))
        else:
            self._send(seq, reason)
        if reason == "cancelled":
            self._scheduler.cancel(seq)
        else:
            self._scheduler.finish(seq)

    def refuse(self, seq: Sequence, error: BaseException) -> None:
        """This request can't go on."""
        self.streams[seq.request.id].fail(error)
        self._scheduler.cancel(seq)

    def fail(self, error: BaseException) -> None:
        for stream in self.streams.values():
            stream.fail(error)

    def _send(self, seq: Sequence, reason: FinishReason | None) -> None:
        stream = self.streams[seq.request.id]
        mask = routing = None
        if reason is not None or 0 < seq.request.record_every <= seq.num_output - seq.num_recorded:
            try:
                mask, routing = self._store_mask(seq), self._store_routes(seq)
            except BlobLost as error:  # costs this request, not the engine
                stream.fail(error)
                return
            seq.num_recorded = seq.num_output
        stream.put(cut_chunk(seq, reason, mask, routing))

    def _store_mask(self, seq: Sequence) -> MaskRef | None:
        """Few blobs a request, most often one: most are small, and files are not free."""
        if not seq.request.record_sampling_mask:
            return None
        masks, seq.masks = seq.masks, []
        mask = join_packed(masks, self.vocab_size)
        return store_mask(self._blobs, _key(seq, "mask"), mask, start=seq.num_recorded)

    def _store_routes(self, seq: Sequence) -> RoutingRef | None:
        """The rows that whoever asked does not have yet. The newest token's is not computed, or is on its way."""
        if self._routes is None or not seq.request.record_routing:
            return None
        start = seq.num_routed
        rows = self._routes.of(seq, start, seq.num_tokens - 1)
        if not len(rows):
            return None
        seq.num_routed = start + len(rows)
        return store_routes(self._blobs, _key(seq, "routes"), rows, self._routes.shape, start=start)


def _key(seq: Sequence, kind: str) -> str:
    """Another one for every piece of a request."""
    piece = f".{seq.num_recorded}" if seq.num_recorded else ""
    return f"{seq.request.blob_scope}/{seq.request.id}{piece}.{kind}"


def _nonfinite(seq: Sequence) -> NonFiniteLogits:
    return NonFiniteLogits(
        f"request {seq.request.id!r} failed after {seq.num_output} tokens: the model's logits are not finite. The "
        "weights have diverged, or the number format overflows: try engine.dtype=bfloat16 instead of float16"
    )
