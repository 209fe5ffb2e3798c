"""The recorded experts of a packed row, token by token."""

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
    """The experts of a sample's tokens, as they were recorded."""

    num_tokens: int
    shape: RoutingShape
    pieces: tuple[tuple[int, Routes], ...]
    """The first token of each record, and its (tokens, layers, k). Tokens between records have none."""

    @classmethod
    def of(cls, sample: Sample, shape: RoutingShape, blobs: BlobStore) -> "SampleRoutes":
        """`BlobLost` where a record is missing, or not one of a model of this shape."""
        for ref in sample.routing:
            check_routing(ref, shape)
        pieces = tuple((ref.start, fetch_routes(blobs, ref)) for ref in sample.routing)
        return cls(num_tokens=len(sample.token_ids), shape=shape, pieces=pieces)

    def lay(self, start: int, stop: int, ids: Routes, known: BoolArray) -> None:
        """Write the experts of tokens `start` to `stop` to `ids`, and whether there is a record to `known`."""
        ids[:], known[:] = 0, False
        for first, rows in self.pieces:
            begin, end = max(start, first), min(stop, first + len(rows))
            if begin < end:
                ids[begin - start : end - start] = rows[begin - first : end - first]
                known[begin - start : end - start] = True

    @property
    def marks(self) -> Routes:
        """A row for each token: two tokens may run as one where their rows are the same."""
        ids, known = no_routes(self.shape, self.num_tokens), np.empty(self.num_tokens, dtype=np.bool_)
        self.lay(0, self.num_tokens, ids, known)
        return np.concatenate([known[:, None].astype(ids.dtype), ids.reshape(len(ids), -1)], axis=1)


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
        """Replay the recorded experts in one forward pass and its backward."""
        return Replay(self.ids, self.known, all_known=self.num_known == len(self.known))

    @classmethod
    def of(
        cls, records: Sequence[SampleRoutes], segments: Sequence[Segment], *, device: torch.device | str
    ) -> "RowRouting":
        """`records` are those of the row's sequences. What is laid once has one record in all that share it."""
        target, shape = torch.device(device), records[0].shape
        num_tokens = sum(part.stop - part.start for part in segments)
        # torch has few operations for unsigned numbers of two bytes
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
