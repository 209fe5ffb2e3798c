"""Records which experts computed each token in the cache, block by block beside the keys and values.

A block's routes are found wherever its keys are: after a prefix hit, in a fork, in a later turn. A sequence that
loses its blocks saves its routes and is computed again with them. The trainer replays one set of experts for each
token, so no token may be computed with different ones before and after.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.sequence import Sequence
from penstock.errors import BlobLost
from penstock.models.routing import Replay
from penstock.models.transfer import upload
from penstock.records import RoutingShape
from penstock.records.interfaces import BlobStore
from penstock.records.routing_records import Routes, check_routing, fetch_routes, no_routes

Slots = npt.NDArray[np.int64]


class BlockRoutes(ABC):
    """Holds the routes of the tokens in a cache, on whatever device the cache is."""

    def __init__(self, shape: RoutingShape, block_size: int) -> None:
        self.shape = shape
        self.blobs: BlobStore | None = None
        """Holds the routes of requests that another engine, or an earlier turn, has computed before."""
        self._block_size = block_size

    @abstractmethod
    def copy_blocks(self, copies: Many[tuple[int, int]]) -> None:
        """Copy blocks (from, to), as the cache does."""

    @abstractmethod
    def _read(self, slots: Slots, *, in_order: bool) -> Routes:
        """Return the rows of these slots. With `in_order` they are read after the queued passes, which may still
        write them."""

    def keep(self, seq: Sequence) -> None:
        """Save the routes of a sequence whose blocks are about to be freed: those of all tokens once one was
        sampled, before that only those of earlier turns. Other tokens get new experts."""
        num_fixed = seq.num_tokens if seq.num_output else seq.request.routing_start
        seq.routes = self.of(seq)[:num_fixed] if num_fixed else None

    def recall(self, seq: Sequence) -> None:
        """Fetch the stored routes of the sequence's first tokens, which another engine or an earlier turn computed.
        A lost blob ends what is recalled."""
        num_known = min(seq.request.routing_start, seq.num_tokens - 1)
        if self.blobs is None or num_known <= (0 if seq.routes is None else len(seq.routes)):
            return
        pieces, end = [], 0
        try:
            for ref in seq.request.routing:
                check_routing(ref, self.shape)
                if ref.start != end:
                    break
                pieces.append(fetch_routes(self.blobs, ref))
                end = ref.end
        except BlobLost:
            pass  # the trainer, which needs the same blob, drops the group and says why
        if pieces:
            seq.routes = np.concatenate(pieces)[:num_known]

    def num_alike(self, seq: Sequence, first: int, blocks: Many[int]) -> int:
        """Count the leading blocks that were computed with the routes that the sequence replays. `blocks` are
        for its tokens from its block number `first` on."""
        assert seq.routes is not None
        size = self._block_size
        slots = (np.array(blocks, dtype=np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        wanted = seq.routes[first * size :][: len(slots)]
        rows = self._read(slots[: len(wanted)], in_order=True)
        differs = np.flatnonzero((rows != wanted).any(axis=(1, 2)))
        return int(differs[0]) // size if differs.size else len(blocks)

    def replay(
        self, spans: Many[tuple[Sequence, int, int]], owners: npt.NDArray[np.int64], device: torch.device
    ) -> Replay | None:
        """Return answers for the routers of a pass over these spans, so that tokens that are computed again keep
        their experts; None if no token has saved ones. `owners` names the span of each token of the pass."""
        ids = known = None
        for number, (seq, start, count) in enumerate(spans):
            if seq.routes is None or start >= len(seq.routes):
                continue
            if ids is None or known is None:
                ids, known = no_routes(self.shape, len(owners)), np.zeros(len(owners), dtype=np.bool_)
            rows = seq.routes[start : start + count]
            places = np.flatnonzero(owners == number)[: len(rows)]
            ids[places], known[places] = rows, True
        if ids is None or known is None:
            return None
        layers = ids.transpose(1, 0, 2)
        return Replay(
            upload(layers.view(np.int16) if ids.itemsize == 2 else layers, device), upload(known, device)
        )

    def of(self, seq: Sequence, start: int = 0, stop: int | None = None) -> Routes:
        """Return the routes of the sequence's computed tokens from `start` to `stop`: those of the first
        computation, if a token was computed again."""
        kept = no_routes(self.shape) if seq.routes is None else seq.routes
        end = seq.num_computed if stop is None else min(stop, seq.num_computed)
        places = np.arange(max(start, len(kept)), end)
        if not len(places):
            return kept[start:stop]
        blocks = np.array(seq.blocks, dtype=np.int64)
        slots = blocks[places // self._block_size] * self._block_size + places % self._block_size
        # The tokens before one that was drawn are computed. Without a drawn token they may be in flight.
        in_order = stop is None or end >= seq.num_tokens or seq.num_output <= seq.num_recorded
        return np.concatenate([kept[start:], self._read(slots, in_order=in_order)])


class RouteStore(BlockRoutes):
    """Holds the routes of `num_blocks` blocks on the host."""

    def __init__(self, shape: RoutingShape, *, num_blocks: int, block_size: int) -> None:
        super().__init__(shape, block_size)
        self._tokens = no_routes(shape, num_blocks * block_size)

    def copy_blocks(self, copies: Many[tuple[int, int]]) -> None:
        if copies:
            blocks = self._tokens.reshape(-1, self._block_size, *self._tokens.shape[1:])
            sources, targets = np.array(copies, dtype=np.int64).T
            blocks[targets] = blocks[sources]

    def write(self, slots: torch.Tensor, ids: Many[torch.Tensor | None]) -> None:
        """Store what the routers of a pass have chosen, one (tokens, k) each, for the tokens in these slots."""
        chosen = [each for each in ids if each is not None]
        assert len(chosen) == self.shape.num_layers, "every router chooses in every pass"
        self._tokens[slots.numpy()] = torch.stack(chosen, dim=1).numpy()

    def _read(self, slots: Slots, *, in_order: bool) -> Routes:
        return self._tokens[slots]
