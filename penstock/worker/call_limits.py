"""Limits the CPU time of calls into users' code. Past the limit the system ends the process (SIGXCPU).

The worker pool limits the wall-clock time and ends a process that does not answer; the launcher limits the
memory (`memory_limit`). Programs that the code starts inherit the CPU limit.
"""

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager


class CallLimits:
    """Sets the limit of one process. Each call may use `cpu_s`; concurrent calls share the sum."""

    def __init__(self, *, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._num_running = 0

    @contextmanager
    def calls(self, count: int = 1) -> Iterator[None]:
        """Count this many calls as running while the block runs."""
        self._num_running += count
        self._grant()
        try:
            yield
        finally:
            self._num_running -= count
            self._grant()

    def _grant(self) -> None:
        """Set the limit for the calls that run now. Without any, CPU time is not limited."""
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = hard
        if self._num_running:
            soft = math.ceil(time.process_time() + self._cpu_s * self._num_running)
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
