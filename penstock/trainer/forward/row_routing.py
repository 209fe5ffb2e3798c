"""The recorded experts of a packed row, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.interfaces import BlobStore
from penstock.models.routing import Replay
from penstock.routing_records import check_routing, fetch_routes, no_routes
from penstock.trainer.sharing import Segment
from penstock.types import RoutingRef, RoutingShape, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRouting:
    """Experts of every token of a row. A prompt that is laid once has the record of one of its sequences."""

    ids: torch.Tensor
    """(layers, tokens, k)."""
    known: torch.Tensor
    """(tokens,): whether there is a record."""
    num_known: int

    @property
    def num_choices(self) -> int:
        """(layer, token) pairs."""
        return int(self.ids.shape[0] * self.ids.shape[1])

    @property
    def num_replayed(self) -> int:
        return int(self.ids.shape[0]) * self.num_known

    def replay(self) -> Replay:
        """For one forward pass and its backward."""
        return Replay(self.ids, self.known)

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        segments: Sequence[Segment],
        shape: RoutingShape,
        *,
        blobs: BlobStore,
        device: torch.device | str,
    ) -> "RowRouting":
        """`BlobLost` where a record is missing, or not one of a model of this shape."""
        rows, known = [], []
        for segment in segments:
            size = segment.stop - segment.start
            rows.append(no_routes(shape, size))
            known.append(np.zeros(size, dtype=np.bool_))
            for ref in _parts(samples[segment.sequence], segment):
                check_routing(ref, shape)
                part = slice(ref.start - segment.start, ref.end - segment.start)
                rows[-1][part] = fetch_routes(blobs, ref)
                known[-1][part] = True
        ids = np.concatenate(rows).astype(np.int16).transpose(1, 0, 2)
        of_tokens = np.concatenate(known)
        return cls(
            ids=torch.from_numpy(np.ascontiguousarray(ids)).to(device),
            known=torch.from_numpy(of_tokens).to(device),
            num_known=int(of_tokens.sum()),
        )


def _parts(sample: Sample, segment: Segment) -> list[RoutingRef]:
    parts = (ref.within(segment.start, segment.stop) for ref in sample.routing)
    return [part for part in parts if part is not None]
