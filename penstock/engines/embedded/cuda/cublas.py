"""cuBLASLt, by its own interface: all the algorithms it names for a product, and one of them run.

torch always takes the first. The library is the one that torch has already loaded, so nothing is installed;
where it can't be found there are no algorithms, and torch multiplies.
"""

import ctypes
import functools
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
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


class Product:
    """x (rows, inner) times the transpose of a weight (outer, inner), plus a bias if there is one.

    The library counts in columns: what is a row here is a column there, so the weight comes first."""

    def __init__(
        self, handle: Handle, *, rows: int, outer: int, inner: int, dtype: torch.dtype, bias: bool
    ) -> None:
        self._handle = handle
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

    def run(
        self,
        algorithm: Algorithm,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Queue the product on the current stream; everything dense, and as large as was said."""
        if bias is not None:
            self._set(DESC_BIAS_POINTER, c_void_p(bias.data_ptr()))
        one, zero = c_float(1.0), c_float(0.0)
        result = c_void_p(out.data_ptr())
        workspace = self._handle.workspace
        stream = torch.cuda.current_stream(self._handle.device).cuda_stream
        self._handle.call(
            "cublasLtMatmul", self._handle.pointer, self._desc,
            byref(one), c_void_p(weight.data_ptr()), self._weight, c_void_p(x.data_ptr()), self._input,
            byref(zero), result, self._output, result, self._output,
            byref(algorithm.data), c_void_p(workspace.data_ptr()), c_size_t(workspace.numel()), c_void_p(stream),
        )  # fmt: skip

    def _set(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._handle.call("cublasLtMatmulDescSetAttribute", self._desc, attribute, byref(value), size)
