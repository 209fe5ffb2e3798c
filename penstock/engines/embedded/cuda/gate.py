"""Where new weights come in: between any two steps of what is already queued.

The host launches far ahead, so an update that queued behind all of it would be late. Instead every step ends at
a gate, a kernel of one warp. While the host asks for a stop, the first step that gets there says so and stands
still; weights are copied on another stream; then the gate opens, and what was queued goes on with them.

    main    ── step ─ gate ─ step ─ gate ······ stands still ······ step ─ gate ──
    side                              └─ copy, hash ─ version ─ open ┘

Which weights a step used is therefore known to the device alone: it writes the live version beside each token.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.engines.embedded.cuda.kernels import NEWEST, STOOD_NS, STOPPED, TOLD, WENT_ON, stop_if_asked
from penstock.engines.embedded.stepping import Swapped
from penstock.interfaces import Verification

LOOK_AGAIN_S = 20e-6


class Gate:
    """The gate of one engine. On a CPU nothing is ever queued, so nothing has to stop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.version = torch.zeros(1, dtype=torch.int64, device=device)
        """Whose weights are live, for kernels to read."""
        self._opened = torch.zeros(1, dtype=torch.int64, device=device)
        self._asked, self._told = (_host_memory(size, device) for size in (1, TOLD))
        self._answers: Any = self._told.numpy()
        self._number = 0
        # Launches that block would wait for a gate that only a later launch opens.
        is_blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        self._stops = device.type == "cuda" and not is_blocking
        if self._stops:
            self._side: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def newest(self) -> int:
        """The version of the newest tokens, which the host may not have seen yet."""
        return int(self._answers[NEWEST]) if self._device.type == "cuda" else int(self.version)

    def check(self) -> None:
        """Queue a place at which the device may stand still."""
        if self._device.type == "cuda":
            stop_if_asked(self._asked, self._opened, self.version, self._told)

    def let_in(self, receive: Callable[[], Verification], version: int, *, is_busy: bool) -> Swapped:
        """Run `receive`, and wait until the new weights are verified. On a device that is busy it runs between
        two steps, and must not do more than queue work: to load a kernel or to take memory, CUDA may wait until
        the device is idle, and it would wait for ever."""
        if not (is_busy and self._stops):
            started = time.perf_counter()
            verify_s = receive()()
            self.version.fill_(version)
            return Swapped(time.perf_counter() - started, verify_s)
        ticket = self._stop()
        with torch.cuda.stream(self._side):
            try:
                verify = receive()
            finally:
                self.version.fill_(version)
                self._opened.fill_(ticket)
        verify_s = verify()
        self._until(WENT_ON, ticket, self._side)
        return Swapped(float(self._answers[STOOD_NS]) / 1e9, verify_s)

    def _stop(self) -> int:
        """Returns when the device stands still. Behind all that is queued there is one more place for that."""
        self._number += 1
        self._asked.fill_(self._number)
        self.check()
        last: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        last.record(torch.cuda.current_stream(self._device))
        self._until(STOPPED, self._number, last)
        return self._number

    def _until(self, answer: int, ticket: int, work: Any) -> None:
        while self._answers[answer] < ticket:
            work.query()  # raises when the device has failed, and will never answer
            time.sleep(LOOK_AGAIN_S)


def _host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Numbers of the host that kernels can read and write."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
