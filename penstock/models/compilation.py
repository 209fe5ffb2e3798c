"""Decides which models are worth `torch.compile`, and whether Triton kernels can be used.

Modules that hold kernels import only where triton is installed, so their callers ask `has_triton` first. With
`TRITON_INTERPRET=1` the same kernels run on a CPU, for tests.
"""

import functools
import importlib.util

COMPILED_FROM = 100_000_000
"""The number of parameters from which `torch.compile` is worth its compile time."""


def is_worth_compiling(device: str, num_parameters: int) -> bool:
    """Return whether the model is large enough to compile. A CPU gains nothing from it at any size."""
    return device != "cpu" and num_parameters >= COMPILED_FROM


@functools.cache
def has_triton() -> bool:
    """Return whether triton is installed; torch's CUDA builds come with it."""
    return importlib.util.find_spec("triton") is not None
