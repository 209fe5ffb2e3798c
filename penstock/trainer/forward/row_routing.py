"""The recorded experts of a packed row, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.interfaces import BlobStore
from penstock.models.routing import Replay
from penstock.routing_records import Routes, check_routing, fetch_routes, no_routes
from penstock.trainer.sharing import Segment
from penstock.transfer import upload
from penstock.types import BoolArray, IntArray, RoutingShape, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRoutes:
    """The experts of a sample's tokens, as they were recorded."""

    ids: Routes
    """(tokens, layers, k)."""
    known: BoolArray
    """(tokens,): whether there is a record."""

    @classmethod
    def of(cls, sample: Sample, shape: RoutingShape, blobs: BlobStore) -> "SampleRoutes":
        """`BlobLost` where a record is missing, or not one of a model of this shape."""
        ids, known = no_routes(shape, len(sample.token_ids)), np.zeros(len(sample.token_ids), dtype=np.bool_)
        for ref in sample.routing:
            check_routing(ref, shape)
            ids[ref.start : ref.end] = fetch_routes(blobs, ref)
            known[ref.start : ref.end] = True
        return cls(ids=ids, known=known)

    @property
    def marks(self) -> IntArray:
        """A row for each token: two tokens may run as one where their rows are the same."""
        flat: IntArray = self.ids.reshape(len(self.ids), -1).astype(np.int32)
        flat[~self.known] = -1
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRouting:
    """Experts of every token of a row."""

    ids: torch.Tensor
    """(layers, tokens, k), in as many bytes as records have."""
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
        return Replay(self.ids, self.known, all_known=self.num_known == len(self.known))

    @classmethod
    def of(
        cls, records: Sequence[SampleRoutes], segments: Sequence[Segment], *, device: torch.device | str
    ) -> "RowRouting":
        """`records` are those of the row's sequences. What is laid once has one record in all that share it."""
        parts = [(records[part.sequence], slice(part.start, part.stop)) for part in segments]
        ids = np.concatenate([record.ids[part] for record, part in parts])
        of_tokens = np.concatenate([record.known[part] for record, part in parts])
        if ids.dtype.itemsize > 1:
            ids = ids.view(np.int16)  # torch has few operations for unsigned numbers of two bytes
        return cls(
            ids=upload(ids, torch.device(device)).transpose(0, 1).contiguous(),
            known=upload(of_tokens, torch.device(device)),
            num_known=int(of_tokens.sum()),
        )
