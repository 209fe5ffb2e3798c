"""cuBLASLt, by its own interface: the algorithms for a product, and one of them run.

The library names a few, likeliest first, and torch always takes the first. It has many more: what it names can be
given other tiles, such as divide the work evenly among the multiprocessors. The library is the one that torch has
already loaded, so nothing is installed; where it can't be found there are no algorithms, and torch multiplies.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

WORKSPACE_BYTES = 32 << 20
MOST_ALGORITHMS = 32

# Numbers of the library's C interface.
COMPUTE_32F, REAL_32F = 68, 0
TYPES = {torch.bfloat16: 14, torch.float16: 2}
DESC_TRANSPOSE_A, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 7, 8
EPILOGUE_BIAS = 4
PREFERENCE_WORKSPACE = 1
CONFIG_ID, CONFIG_TILE, CONFIG_SPLITS, CONFIG_REDUCTION, CONFIG_OPTION, CONFIG_CLUSTER = 0, 1, 2, 3, 5, 8
CONFIGS = (CONFIG_ID, CONFIG_TILE, CONFIG_SPLITS, CONFIG_REDUCTION, CONFIG_OPTION, CONFIG_CLUSTER)
PAIRS = (3, 5)
"""Clusters of two, side by side along the outer size or along the rows."""
TILES = {
    (112, 128): 165, (112, 256): 167, (128, 128): 20, (128, 192): 32, (128, 256): 23, (144, 128): 184,
    (144, 256): 186, (160, 128): 30, (160, 256): 195, (176, 128): 201, (176, 256): 203, (192, 128): 31,
    (192, 192): 209, (192, 256): 210, (208, 128): 215, (224, 128): 221, (256, 128): 24,
}  # fmt: skip
"""Outer size and rows of a tile."""
CLUSTERS = {2: "1x1", 3: "2x1", 4: "4x1", 5: "1x2", 6: "2x2", 7: "4x2", 8: "1x4", 9: "2x4"}
"""Clusters of tiles by the library's numbers."""
EVEN = 0.9
"""Share of the multiprocessors' time that goes into the result, of tiles worth a try."""


class CublasError(RuntimeError):
    """A call of the library failed; the status is its own."""


class Algorithm(ctypes.Structure):
    """One answer of the library's heuristic."""

    _fields_ = (
        ("data", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )

    @classmethod
    def of(cls, data: bytes) -> "Algorithm":
        """One that was kept: its `data`, which is all that a product needs."""
        made = cls()
        ctypes.memmove(made.data, data, min(len(data), ctypes.sizeof(made.data)))
        return made


def describe(algorithm: Algorithm) -> str:
    """Its settings; numbers of the library where we have no name."""
    tile = _config(algorithm, CONFIG_TILE)
    cluster = _config(algorithm, CONFIG_CLUSTER)
    shape = next((f"{outer}x{rows}" for (outer, rows), number in TILES.items() if number == tile), str(tile))
    splits, option = (_config(algorithm, each) for each in (CONFIG_SPLITS, CONFIG_OPTION))
    return f"tiles {shape}, clusters {CLUSTERS.get(cluster, cluster)}, splits {splits}, option {option}"


def even_tiles(outer: int, rows: int, multiprocessors: int) -> list[tuple[int, int]]:
    """Tiles that leave few multiprocessors without work in the last round, and little outside the matrix."""

    def share(tile: tuple[int, int]) -> float:
        count = -(-outer // tile[0]) * -(-rows // tile[1])
        rounds = -(-count // multiprocessors)
        return outer * rows / (rounds * multiprocessors * tile[0] * tile[1])

    return [tile for tile in TILES if share(tile) >= EVEN]


@functools.cache
def library() -> Any:
    """The library of the CUDA that torch was built for, which torch has loaded; None where there is none."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}") if major else None
    except OSError:
        return None


class Handle:
    """One connection to the library, with the memory that algorithms may use between two steps of theirs.
    Products that share it must be queued on one stream."""

    def __init__(self, device: torch.device, lib: Any) -> None:
        self.device = device
        self._lib = lib
        self._handle = c_void_p()
        with torch.cuda.device(device):
            self.call("cublasLtCreate", byref(self._handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise CublasError(f"{name} answered {status}")

    @property
    def pointer(self) -> c_void_p:
        return self._handle

    @property
    def version(self) -> int:
        """Of the library."""
        return int(self._lib.cublasLtGetVersion())


class Product:
    """x (rows, inner) times the transpose of a weight (outer, inner), plus a bias, or plus another matrix.

    The library counts in columns: what is a row here is a column there, so the weight comes first."""

    def __init__(
        self, handle: Handle, rows: int, outer: int, inner: int, dtype: torch.dtype, *, bias: bool
    ) -> None:
        self._handle = handle
        self._size = outer, rows
        self._desc, self._weight, self._input, self._output = (c_void_p() for _ in range(4))
        handle.call("cublasLtMatmulDescCreate", byref(self._desc), COMPUTE_32F, REAL_32F)
        self._set(DESC_TRANSPOSE_A, c_int(1))
        if bias:
            self._set(DESC_EPILOGUE, c_int(EPILOGUE_BIAS))
        for layout, height, width in (
            (self._weight, inner, outer),
            (self._input, inner, rows),
            (self._output, outer, rows),
        ):
            sizes = c_uint64(height), c_uint64(width), c_int64(height)
            handle.call("cublasLtMatrixLayoutCreate", byref(layout), TYPES[dtype], *sizes)

    def algorithms(self) -> Sequence[Algorithm]:
        """Those that the library thinks fit, likeliest first; none where it knows none."""
        preference, count = c_void_p(), c_int()
        limit = c_uint64(WORKSPACE_BYTES)
        found = (Algorithm * MOST_ALGORITHMS)()
        call = self._handle.call
        call("cublasLtMatmulPreferenceCreate", byref(preference))
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            PREFERENCE_WORKSPACE,
            byref(limit),
            c_size_t(8),
        )
        shapes = self._desc, self._weight, self._input, self._output, self._output
        with suppress(CublasError):
            call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle.pointer, *shapes, preference, MOST_ALGORITHMS,
                found, byref(count),
            )  # fmt: skip
        call("cublasLtMatmulPreferenceDestroy", preference)
        return [found[at] for at in range(count.value) if found[at].state == 0]

    def variations(self, named: Sequence[Algorithm]) -> Sequence[Algorithm]:
        """What was named, with every tile that divides the work evenly, in clusters of two, where that is not named
        already."""
        properties: Any = torch.cuda.get_device_properties(self._handle.device)
        tiles = even_tiles(*self._size, properties.multi_processor_count)
        kinds = {(_config(each, CONFIG_ID), _config(each, CONFIG_OPTION)): each for each in named}
        known = {_settings(each) for each in named}
        found = []
        for kind, tile, cluster in itertools.product(kinds.values(), tiles, PAIRS):
            made = Algorithm.from_buffer_copy(kind)
            settings = {
                CONFIG_TILE: TILES[tile],
                CONFIG_CLUSTER: cluster,
                CONFIG_SPLITS: 1,
                CONFIG_REDUCTION: 0,
            }
            with suppress(CublasError):
                for attribute, value in settings.items():
                    self._configure(made, attribute, value)
                if _settings(made) not in known and self.is_valid(made):
                    found.append(made)
        return found

    def _configure(self, algorithm: Algorithm, attribute: int, value: int) -> None:
        number = _number(attribute)(value)
        size = c_size_t(ctypes.sizeof(number))
        self._handle.call(
            "cublasLtMatmulAlgoConfigSetAttribute", byref(algorithm.data), attribute, byref(number), size
        )

    def is_valid(self, algorithm: Algorithm) -> bool:
        """Whether the library can run it for this product; raises where it knows no such thing."""
        result = Algorithm()
        shapes = self._desc, self._weight, self._input, self._output, self._output
        self._handle.call(
            "cublasLtMatmulAlgoCheck", self._handle.pointer, *shapes, byref(algorithm.data), byref(result)
        )
        return bool(result.workspace <= WORKSPACE_BYTES)

    def run(
        self,
        algorithm: Algorithm,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
    ) -> None:
        """Queue the product, plus `added` if there is one; everything dense, and as large as was said."""
        if bias is not None:
            self._set(DESC_BIAS_POINTER, c_void_p(bias.data_ptr()))
        scale, keep = c_float(1.0), c_float(0.0 if added is None else 1.0)
        result = c_void_p(out.data_ptr())
        other = result if added is None else c_void_p(added.data_ptr())
        workspace = self._handle.workspace
        stream = torch.cuda.current_stream(self._handle.device).cuda_stream
        self._handle.call(
            "cublasLtMatmul", self._handle.pointer, self._desc,
            byref(scale), c_void_p(weight.data_ptr()), self._weight, c_void_p(x.data_ptr()), self._input,
            byref(keep), other, self._output, result, self._output,
            byref(algorithm.data), c_void_p(workspace.data_ptr()), c_size_t(workspace.numel()), c_void_p(stream),
        )  # fmt: skip

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._handle.call("cublasLtMatmulDescSetAttribute", self._desc, attribute, byref(value), size)


def _number(attribute: int) -> Any:
    return c_uint16 if attribute == CONFIG_CLUSTER else c_uint32


def _settings(algorithm: Algorithm) -> tuple[int, ...]:
    return tuple(_config(algorithm, attribute) for attribute in CONFIGS)


def _config(algorithm: Algorithm, attribute: int) -> int:
    """A setting of an algorithm; 0 where the library does not say."""
    number, written = _number(attribute)(), c_size_t()
    library().cublasLtMatmulAlgoConfigGetAttribute(
        byref(algorithm.data), attribute, byref(number), c_size_t(ctypes.sizeof(number)), byref(written)
    )
    return int(number.value)
