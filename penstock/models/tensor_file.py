"""Writes safetensors files from host memory without a copy, and without blocking other Python threads.

The safetensors library's own writer holds the GIL until the last byte is written. A trainer that writes a
checkpoint beside its steps could launch nothing meanwhile.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from penstock.checksums import Checksum
from penstock.errors import DiskFull
from penstock.safe_files import is_full_disk

PIECE_BYTES = 64 << 20
"""The size of one write; Linux accepts at most 2 GiB."""
ALIGNMENT = 8
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Checksum:
    """Write tensors, which may be views, to a safetensors file. Tensors on a device are moved to the host one at
    a time. The checksum is that of the bytes in memory, whatever reaches the disk."""
    # Tensors with wide elements come first, so that each starts at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = _header(ordered)
    num_bytes = len(header) + sum(tensor.nbytes for _, tensor in ordered)
    crc = zlib.crc32(header)
    try:
        with path.open("wb") as file:
            file.write(header)
            for _, tensor in ordered:
                values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                for piece in torch.split(values, PIECE_BYTES):
                    data = piece.numpy().data
                    file.write(data)
                    crc = zlib.crc32(data, crc)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DiskFull(f"{path.name} needs {num_bytes:,} bytes") from error
    return num_bytes, f"{crc:08x}"


def _header(ordered: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """Return the file's header: its own length, then the offsets of the tensors after it, as JSON."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
