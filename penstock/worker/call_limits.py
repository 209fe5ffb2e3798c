"""How much CPU time calls into users' code may use. Past it the system ends the process (SIGXCPU).

The wall clock is the pool's, which ends a process that does not answer; memory is the launcher's (`memory_limit`).
Programs that the code starts inherit the limit.
"""

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager


class CallLimits:
    """Of one process. `cpu_s` is for each call; those that run at once have it together."""

    def __init__(self, *, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._num_running = 0

    @contextmanager
    def calls(self, count: int = 1) -> Iterator[None]:
        """While so many calls run."""
        self._num_running += count
        self._grant()
        try:
            yield
        finally:
            self._num_running -= count
            self._grant()

    def _grant(self) -> None:
        """From now on, what the calls that run may use. Without any, nothing is counted."""
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = hard
        if self._num_running:
            soft = math.ceil(time.process_time() + self._cpu_s * self._num_running)
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
