"""What is compiled here: which models are worth `torch.compile`, and whether Triton kernels can be used.

Modules that hold kernels import only where triton is installed, so their callers ask `has_triton` first. Under
`TRITON_INTERPRET=1` the same kernels run on a CPU, for tests.
"""

import functools
import importlib.util

COMPILED_FROM = 100_000_000
"""Parameters from which `torch.compile` is worth its start: the layers of smaller models are quick without it."""


def is_worth_compiling(device: str, num_parameters: int) -> bool:
    """`num_parameters` matters only on a GPU: a CPU gains nothing from it."""
    return device != "cpu" and num_parameters >= COMPILED_FROM


@functools.cache
def has_triton() -> bool:
    """Triton comes with torch's CUDA builds."""
    return importlib.util.find_spec("triton") is not None
