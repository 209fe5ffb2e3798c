"""Lays out the recorded experts of a packed row, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.models.routing import Replay
from penstock.models.transfer import host_buffer
from penstock.records import BoolArray, RoutingShape, Sample
from penstock.records.interfaces import BlobStore
from penstock.records.routing_records import Routes, check_routing, fetch_routes, id_dtype, no_routes
from penstock.trainer.step.sharing import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRoutes:
    """Holds the recorded experts of a sample's tokens."""

    num_tokens: int
    shape: RoutingShape
    pieces: tuple[tuple[int, Routes], ...]
    """The first token of each record, and its (tokens, layers, k). Tokens between records have no experts."""

    @classmethod
    def of(cls, sample: Sample, shape: RoutingShape, blobs: BlobStore) -> "SampleRoutes":
        """Fetch the records of a sample. Raises `BlobLost` if a record is missing, or belongs to a model of
        another shape."""
        for ref in sample.routing:
            check_routing(ref, shape)
        pieces = tuple((ref.start, fetch_routes(blobs, ref)) for ref in sample.routing)
        return cls(num_tokens=len(sample.token_ids), shape=shape, pieces=pieces)

    def lay(self, start: int, stop: int, ids: Routes, known: BoolArray) -> None:
        """Write the experts of tokens `start` to `stop` to `ids`, and whether they are recorded to `known`."""
        ids[:], known[:] = 0, False
        for first, rows in self.pieces:
            begin, end = max(start, first), min(stop, first + len(rows))
            if begin < end:
                ids[begin - start : end - start] = rows[begin - first : end - first]
                known[begin - start : end - start] = True

    @property
    def marks(self) -> Routes:
        """Return one row for each token. Two tokens may run as one only if their rows are equal."""
        ids, known = no_routes(self.shape, self.num_tokens), np.empty(self.num_tokens, dtype=np.bool_)
        self.lay(0, self.num_tokens, ids, known)
        return np.concatenate([known[:, None].astype(ids.dtype), ids.reshape(len(ids), -1)], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRouting:
    """Holds the recorded experts of a row's tokens, and which tokens have a record."""

    ids: torch.Tensor
    """(layers, tokens, k), with as many bytes per id as in the records."""
    known: torch.Tensor
    """(tokens,): whether there is a record."""
    num_known: int

    @property
    def num_choices(self) -> int:
        """Return the number of (layer, token) pairs."""
        return int(self.ids.shape[0] * self.ids.shape[1])

    @property
    def num_replayed(self) -> int:
        return int(self.ids.shape[0]) * self.num_known

    def replay(self) -> Replay:
        """Return an observer that replays the recorded experts in one forward pass and its backward."""
        return Replay(self.ids, self.known, all_known=self.num_known == len(self.known))

    @classmethod
    def of(
        cls, records: Sequence[SampleRoutes], segments: Sequence[Segment], *, device: torch.device | str
    ) -> "RowRouting":
        """Lay out the records of the row's sequences. Tokens that several sequences share have the same record
        in each."""
        target, shape = torch.device(device), records[0].shape
        num_tokens = sum(part.stop - part.start for part in segments)
        # int16 stands in for uint16, for which torch has few operations.
        ids = host_buffer(
            (num_tokens, shape.num_layers, shape.top_k),
            torch.uint8 if shape.id_bytes == 1 else torch.int16,
            target,
        )
        known = host_buffer((num_tokens,), torch.bool, target)
        all_ids, all_known = ids.numpy().view(id_dtype(shape)), known.numpy()
        begin = 0
        for part in segments:
            end = begin + part.stop - part.start
            records[part.sequence].lay(part.start, part.stop, all_ids[begin:end], all_known[begin:end])
            begin = end
        return cls(
            ids=ids.to(target, non_blocking=True).transpose(0, 1).contiguous(),
            known=known.to(target, non_blocking=True),
            num_known=int(all_known.sum()),
        )
