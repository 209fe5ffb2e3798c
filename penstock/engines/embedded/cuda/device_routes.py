"""Records which experts computed each token in a GPU's cache; the passes write it themselves, also in CUDA graphs.

The record has a row for every slot of the cache. It is copied and reassigned with the blocks, in the order of the
passes. The host reads the rows of a sequence once, when it ends or loses its blocks. These rows were mostly written
by launches that the host has already read: then a stream of its own copies them, and no step waits.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from penstock.engines.embedded.cuda.device_attention import CurrentPass
from penstock.engines.embedded.route_store import BlockRoutes, Slots
from penstock.engines.embedded.scheduler import Span
from penstock.models.routing import Replay, Routers
from penstock.models.transfer import download, upload
from penstock.records.routing_records import Routes, id_dtype


class DeviceRoutes(BlockRoutes):
    """Holds the routes of `num_blocks` blocks and of the scratch block, as `routers` choose them."""

    def __init__(self, routers: Routers, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        super().__init__(routers.shape, block_size)
        shape, self._device = routers.shape, device
        dtype = torch.uint8 if shape.id_bytes == 1 else torch.int16
        size = (shape.num_layers, (num_blocks + 1) * block_size, shape.top_k)
        self._record = torch.zeros(size, dtype=dtype, device=device)
        self._pass: CurrentPass | None = None
        self._replay: Replay | None = None
        self._side: Any = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        routers.watch()
        routers.choices = self

    def follow(self, current: CurrentPass) -> None:
        """Record what routers choose from now on for the tokens of this pass."""
        self._pass = current
        # Loads the kernel now: for that CUDA may wait until the device is idle.
        self._read(np.zeros(1, dtype=np.int64), in_order=True)

    def choose(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        assert self._pass is not None and self._pass.plan is not None, "a plan comes before a forward pass"
        if self._replay is not None:
            ids = self._replay.choose(layer, ids)
        return self._pass.plan.record(ids, self._record[layer], self._block_size)

    @contextmanager
    def replaying(self, spans: Many[Span], owners: Slots) -> Iterator[None]:
        """Within this block, tokens of these spans that were computed before keep their recorded experts. Decode
        steps need no replay: the newest token of a sequence has no record."""
        self._replay = self.replay(spans, owners, self._device)
        try:
            yield
        finally:
            self._replay = None

    def copy_blocks(self, copies: Many[tuple[int, int]]) -> None:
        if copies:
            sources, targets = upload(np.array(copies, dtype=np.int64).T, self._device)
            blocks = self._record.view(self.shape.num_layers, -1, self._block_size * self.shape.top_k)
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def _read(self, slots: Slots, *, in_order: bool) -> Routes:
        if self._side is None:
            return self._gather(slots)
        if in_order:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            rows = self._gather(slots)
        self._side.synchronize()
        return rows

    def _gather(self, slots: Slots) -> Routes:
        """Return (tokens, layers, k), valid once the present stream has done the copy."""
        rows = self._record.index_select(1, upload(slots, self._device)).transpose(0, 1).contiguous()
        return download(rows).numpy().view(id_dtype(self.shape))
