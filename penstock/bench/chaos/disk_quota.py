"""A disk without room for a running process: its files may not grow past a limit, which is set from outside.

To the process a write past the limit fails as on a full disk; what was written stays."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_room(pid: int, largest_bytes: int) -> Iterator[None]:
    """Inside, no file of this process may grow past so many bytes."""
    _, hard = before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest_bytes, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
