"""Represents buckets as an engine holds them between staging and loading: values to copy, or changes to apply."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.errors import DamagedBucket
from penstock.records import Payload, TensorSpec
from penstock.sync.bucket_layout import bucket_size, part, unit_width, view
from penstock.sync.delta import Change, decode

Copy = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Copies published values of the tensor of this name over live ones."""

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types that torch can XOR on every device."""


@dataclass(frozen=True, slots=True)
class Values:
    """Holds a bucket as it was published."""

    specs: Sequence[TensorSpec]
    bucket: torch.Tensor

    def load(self, tensors: Mapping[str, torch.Tensor], copy: Copy) -> None:
        for spec in self.specs:
            copy(spec.name, part(tensors[spec.name], spec), view(self.bucket, spec))


@dataclass(frozen=True, slots=True)
class Piece:
    """Holds the changes of the values that a spec names. With `places` None, `bits` covers all units."""

    spec: TensorSpec
    places: torch.Tensor | None
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """Holds the differences from the base, which is the version that the engine serves."""

    pieces: Sequence[Piece]

    def load(self, tensors: Mapping[str, torch.Tensor], copy: Copy) -> None:
        for piece in self.pieces:
            live = part(tensors[piece.spec.name], piece.spec)
            dtype: torch.dtype = getattr(torch, piece.spec.dtype)
            if live.dtype == dtype and live.is_contiguous():
                _flip(live, piece)
            else:
                values = live.to(dtype).contiguous()
                _flip(values, piece)
                copy(piece.spec.name, live, values)


StagedBucket = Values | Changes


def check_payload(payload: Payload, data: torch.Tensor, *, what: str) -> None:
    """Raise `DamagedBucket` unless these are the bytes that were sent."""
    if data.numel() != payload.num_bytes:
        raise DamagedBucket(f"{what} was cut: it has {data.numel()} bytes of {payload.num_bytes}")
    if payload.checksum is not None and checksum(data) != payload.checksum:
        raise DamagedBucket(f"{what} arrived damaged: its checksum is not the one that was sent")


def checksum(data: torch.Tensor) -> int:
    return zlib.crc32(data.cpu().numpy().data)


def open_payload(
    payload: Payload, data: torch.Tensor, specs: Sequence[TensorSpec], device: torch.device
) -> StagedBucket:
    """Unpack the bytes of a bucket with these specs, ready to be loaded on the engine's device."""
    if payload.encoding == "dense":
        return Values(specs, data.to(device))
    change = decode(
        payload.encoding, data.cpu().numpy(), width=unit_width(specs), num_bytes=bucket_size(specs)
    )
    return Changes([piece for spec in specs if (piece := _piece(spec, change, device)) is not None])


def _piece(spec: TensorSpec, change: Change, device: torch.device) -> Piece | None:
    """Return the part of a bucket's change that falls on one spec; None where nothing changes."""
    width = change.bits.dtype.itemsize
    first, end = spec.offset // width, (spec.offset + spec.num_bytes) // width
    places = None
    if change.places is None:
        bits = change.bits[first:end]
    else:
        start, stop = np.searchsorted(change.places, [first, end])
        where, bits = change.places[start:stop] - first, change.bits[start:stop]
        # If more than about a fifth of the values changed, the XORs of all take less memory than the positions.
        if len(where) * (where.itemsize + width) > spec.num_bytes:
            every = np.zeros(end - first, dtype=bits.dtype)
            every[where] = bits
            bits = every
        else:
            places = torch.from_numpy(where).to(device)
    if not len(bits):
        return None
    return Piece(spec, places, torch.from_numpy(bits.view(f"i{width}" if width > 1 else "u1")).to(device))


def _flip(values: torch.Tensor, piece: Piece) -> None:
    units = values.detach().view(-1).view(_SIGNED[piece.bits.element_size()])
    if piece.places is None:
        units.bitwise_xor_(piece.bits)
    else:
        units[piece.places] ^= piece.bits
