"""Encodes what has changed between two versions of a bucket, without loss and in the smallest of three forms.

A bucket is seen as *units*: the bits of its elements, 1, 2, 4 or 8 bytes wide. Each unit is XORed with that of the
base, so a value that moved by one step in its last digit leaves one or two bits.

    sparse   only the units that changed: the gap from each to the one before it, then their XORs
    xor      the XORs of all units
    dense    the bucket as it is, where neither of them is smaller

Numbers are stored by planes (all lowest bytes, then all second bytes, …), since upper bytes hardly ever change, and
compressed. Gaps are single bytes: 255 skips 255 unchanged units, and any smaller number is followed by a changed
one. `tests/sync/test_delta.py` checks that decoding inverts encoding for any bits.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import PenstockError
from penstock.records import Encoding

Units = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]

_KINDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SKIP = 255
_LEVEL = 1
"""Level of zlib. Higher ones take several times as long, for a few percent."""
_TRY_XOR_ABOVE = 0.4
"""The share of changed units above which the XORs of all units are tried. Below it they were never smaller: not
with random positions, clusters or whole rows."""


@dataclass(frozen=True, slots=True)
class Change:
    """Holds the XORs of a bucket's units at ascending `places`, or of all units if `places` is None."""

    places: npt.NDArray[np.int64] | None
    bits: Units


def encode(new: torch.Tensor, base: torch.Tensor, *, width: int) -> tuple[Encoding, Bytes | None]:
    """Return the smallest form of `new` for a receiver that has `base`. Both are bytes, a whole number of units
    of `width`. The dense form returns no bytes, since it is `new` itself."""
    bits, places = _changed(new, base, width)
    best: tuple[Encoding, Bytes | None] = ("dense", None)
    size = new.numel()
    num_units = size // width
    sparse = _pack_sparse(places, bits)
    if len(sparse) < size:
        best, size = ("sparse", sparse), len(sparse)
    if len(places) > _TRY_XOR_ABOVE * num_units:
        every = np.zeros(num_units, dtype=_KINDS[width])
        every[places] = bits
        packed = _compress(_planes(every))
        if len(packed) < size:
            best = "xor", packed
    return best


def decode(encoding: Encoding, payload: Bytes, *, width: int, num_bytes: int) -> Change:
    """Decode a payload of `encode` for a bucket of `num_bytes`. Raise `PenstockError` if it was cut or damaged."""
    num_units = num_bytes // width
    try:
        unpacked = np.frombuffer(zlib.decompress(payload.tobytes()) if len(payload) else b"", dtype=np.uint8)
        if encoding == "xor":
            return Change(None, _units(unpacked, num_units, width))
        if encoding != "sparse":
            raise ValueError(f"{encoding} has nothing to decode")
        return _unpack_sparse(unpacked, num_units, width)
    except (zlib.error, ValueError) as error:
        raise PenstockError(
            f"a bucket of changed weights can't be decoded ({error}); it was cut or damaged"
        ) from error


def _changed(new: torch.Tensor, base: torch.Tensor, width: int) -> tuple[Units, npt.NDArray[np.int64]]:
    """Return the XORs of the units that differ, and their positions."""
    if new.device.type == "cpu":
        every = new.numpy().view(_KINDS[width]) ^ base.numpy().view(_KINDS[width])
        places = np.flatnonzero(every)
        return every[places], places
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    there = new.view(kind) ^ base.view(kind)
    found = there.nonzero().view(-1)
    return there[found].cpu().numpy().view(_KINDS[width]), found.cpu().numpy()


def _pack_sparse(places: npt.NDArray[np.int64], bits: Units) -> Bytes:
    if not len(places):
        return np.zeros(0, dtype=np.uint8)
    gaps = np.diff(places, prepend=-1) - 1
    skips, rest = np.divmod(gaps, _SKIP)
    ends = np.cumsum(skips + 1)
    packed = np.full(8 + int(ends[-1]), _SKIP, dtype=np.uint8)
    packed[:8] = np.array([len(places)], dtype="<u8").view(np.uint8)
    packed[7 + ends] = rest
    return _compress(np.concatenate([packed, _planes(bits)]))


def _unpack_sparse(unpacked: Bytes, num_units: int, width: int) -> Change:
    kind = _KINDS[width]
    if not len(unpacked):
        return Change(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=kind))
    count = int(unpacked[:8].view("<u8")[0])
    gaps = unpacked[8 : len(unpacked) - count * width].astype(np.int64)
    ends = np.cumsum(np.where(gaps == _SKIP, _SKIP, gaps + 1))
    places = ends[gaps != _SKIP] - 1
    if len(places) != count or (count and places[-1] >= num_units):
        raise ValueError(f"{len(places)} places for {count} values, of {num_units}")
    return Change(places, _units(unpacked[len(unpacked) - count * width :], count, width))


def _planes(units: Units) -> Bytes:
    """Return all lowest bytes, then all second bytes, and so on."""
    width = units.dtype.itemsize
    return np.ascontiguousarray(units.view(np.uint8).reshape(-1, width).T).reshape(-1)


def _units(planes: Bytes, count: int, width: int) -> Units:
    if len(planes) != count * width:
        raise ValueError(f"{len(planes)} bytes for {count} values of {width}")
    return planes.reshape(width, count).T.copy(order="C").reshape(-1).view(_KINDS[width])


def _compress(data: Bytes) -> Bytes:
    return np.frombuffer(zlib.compress(data.data, _LEVEL), dtype=np.uint8)
