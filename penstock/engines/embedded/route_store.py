"""Which experts computed each token in the cache: kept beside the keys and values, block by block.

A block's routes are found wherever its keys are: after a prefix hit, in a fork, in a later turn. A sequence that
loses its blocks keeps the routes by itself, since new weights may choose others when it is computed again.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch

from penstock.engines.embedded.sequence import Sequence
from penstock.routing_records import Routes, no_routes
from penstock.types import RoutingShape

Slots = npt.NDArray[np.int64]


class BlockRoutes(ABC):
    """Routes of the tokens in a cache, wherever its tensors are."""

    def __init__(self, shape: RoutingShape, block_size: int) -> None:
        self.shape = shape
        self._block_size = block_size

    @abstractmethod
    def copy_blocks(self, copies: Many[tuple[int, int]]) -> None:
        """Copy blocks (from, to), as the cache does."""

    @abstractmethod
    def _read(self, slots: Slots, *, in_order: bool) -> Routes:
        """The rows of these slots. What is `in_order` may still be computed by passes that are queued."""

    def keep(self, seq: Sequence) -> None:
        """Its blocks are about to go. What tokens were sampled with stays what it was."""
        if seq.num_output:
            seq.routes = self.of(seq)

    def of(self, seq: Sequence, start: int = 0, stop: int | None = None) -> Routes:
        """Of its tokens from `start` to `stop` that are computed, each as it was when it was computed first."""
        kept = no_routes(self.shape) if seq.routes is None else seq.routes
        end = seq.num_computed if stop is None else min(stop, seq.num_computed)
        places = np.arange(max(start, len(kept)), end)
        if not len(places):
            return kept[start:stop]
        blocks = np.array(seq.blocks, dtype=np.int64)
        slots = blocks[places // self._block_size] * self._block_size + places % self._block_size
        # The tokens before one that was drawn are computed. Without that, they may be on their way.
        in_order = stop is None or end >= seq.num_tokens or seq.num_output <= seq.num_recorded
        return np.concatenate([kept[start:], self._read(slots, in_order=in_order)])


class RouteStore(BlockRoutes):
    """Routes of `num_blocks` blocks, on the host."""

    def __init__(self, shape: RoutingShape, *, num_blocks: int, block_size: int) -> None:
        super().__init__(shape, block_size)
        self._tokens = no_routes(shape, num_blocks * block_size)

    def copy_blocks(self, copies: Many[tuple[int, int]]) -> None:
        if copies:
            blocks = self._tokens.reshape(-1, self._block_size, *self._tokens.shape[1:])
            sources, targets = np.array(copies, dtype=np.int64).T
            blocks[targets] = blocks[sources]

    def write(self, slots: torch.Tensor, ids: Many[torch.Tensor | None]) -> None:
        """What the routers of a pass have chosen, one (tokens, k) each, for the tokens in these slots."""
        chosen = [each for each in ids if each is not None]
        assert len(chosen) == self.shape.num_layers, "every router chooses in every pass"
        self._tokens[slots.numpy()] = torch.stack(chosen, dim=1).numpy()

    def _read(self, slots: Slots, *, in_order: bool) -> Routes:
        return self._tokens[slots]
