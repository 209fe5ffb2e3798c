"""Whether Triton kernels can be used. Modules that hold them import only where triton is installed;
callers ask `available` first. Under `TRITON_INTERPRET=1` the same kernels run on a CPU, for tests."""

import functools
import importlib.util


@functools.cache
def available() -> bool:
    """Whether the kernels of this folder can be imported: triton comes with torch's CUDA builds."""
    return importlib.util.find_spec("triton") is not None
