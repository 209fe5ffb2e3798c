"""Loads new weights between any two steps of what is already queued.

The host launches far ahead, so an update that queued behind all of it would be late. Instead every step ends
at a gate, a kernel of one warp. While the host asks for a stop, the first step that reaches its gate reports
that and waits. Weights are copied on another stream; then the gate opens, and the queued steps continue with
the new weights.

    main    ── step ─ gate ─ step ─ gate ·········· waits ········· step ─ gate ──
    side                              └─ copy, hash ─ version ─ open ┘

Therefore only the device knows which weights a step used: beside each token it writes the live version of its
row's policy.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from penstock.engines.embedded.cuda.kernels.step_end import (
    GAVE_UP,
    NEWEST,
    RESUMED,
    STOPPED,
    WAITED_NS,
    stop_if_asked,
)
from penstock.engines.embedded.stepper import NOTHING_DRAWN, Swapped
from penstock.errors import PenstockError
from penstock.records.interfaces import Verification

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 20e-6
PATIENCE_NS = 20_000_000_000
"""How long a step waits at its gate before it gives up; copies take milliseconds."""
TRIAL_NS = 200_000_000


class Gate:
    """Stops the queued steps of one engine for new weights. On a CPU nothing is ever queued, so nothing has to
    stop."""

    def __init__(self, device: torch.device, versions: Mapping[str, int], *, spare: int = 0) -> None:
        """`versions` are those of the policies that the loaded weights serve; `spare` more policies may be
        added."""
        self._device = device
        self.numbers = {policy: number for number, policy in enumerate(versions)}
        """The number by which the device knows each policy."""
        self._spare = list(range(len(versions), len(versions) + spare))
        self.versions = torch.zeros(len(versions) + spare, dtype=torch.int64, device=device)
        """The live version of each policy, by the policy's number, for kernels to read."""
        self.device_report = _host_memory(NEWEST + len(self.versions), device)
        """What the device reports: see `STOPPED` and its neighbours in `kernels.step_end`."""
        self._answers: Any = self.device_report.numpy()
        self._asked = _host_memory(1, device)
        self._opened = torch.zeros(1, dtype=torch.int64, device=device)
        self._number = 0
        self._stops = device.type == "cuda"
        if self._stops:
            self._side: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._try()
        # One by one, as updates do: which kernel writes a number depends on its address, and this loads them all.
        for number, version in enumerate([*versions.values(), *[NOTHING_DRAWN] * spare]):
            self.versions[number].fill_(version)
            self.device_report[NEWEST + number] = version

    def number(self, policy: str) -> int:
        """Return the number of a policy; a new one gets the next free number."""
        if policy not in self.numbers:
            self.numbers[policy] = self._spare.pop(0)
        return self.numbers[policy]

    def forget(self, policy: str) -> None:
        """Free the number of a policy that is not served any more. Nothing may be in flight."""
        number = self.numbers.pop(policy)
        self.versions[number].fill_(NOTHING_DRAWN)
        self._spare.append(number)

    def newest(self, policy: str) -> int:
        """Return the version of a policy's newest tokens, which the host may not have seen yet."""
        if policy not in self.numbers:
            return NOTHING_DRAWN
        return int(self._answers[NEWEST + self.numbers[policy]])

    def beside(self, after: Any = None, *, in_order: bool) -> AbstractContextManager[Any]:
        """Run this block's work on a stream of its own, after the event `after`, or with `in_order` after all
        queued steps. Where streams do not run side by side, the steps' own stream runs it."""
        if not self._stops:
            return nullcontext()
        if in_order:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        elif after is not None:
            self._side.wait_event(after)
        return torch.cuda.stream(self._side)

    def drew(self) -> None:
        """Queue a report that tokens were drawn with the present versions."""
        self.device_report[NEWEST:].copy_(self.versions, non_blocking=True)

    def check(self, patience_ns: int = PATIENCE_NS) -> None:
        """Queue a gate, at which the device may have to wait."""
        if self._stops:
            stop_if_asked(self._asked, self._opened, self.device_report, patience_ns)

    def raise_if_given_up(self) -> None:
        """Raise if the device stopped waiting before it had new weights: what it then computed may have used
        half of them."""
        if self._answers[GAVE_UP]:
            raise PenstockError(
                f"the GPU stood still for {PATIENCE_NS / 1e9:.0f} s while new weights were copied, and gave up "
                "waiting: the engine's process must have been stopped in between, and is in no known state"
            )

    def let_in(
        self, load: Callable[[], Verification], policy: str, version: int, *, is_busy: bool
    ) -> Swapped:
        """Run `load`, and wait until the new weights are verified. On a busy device `load` runs between two
        steps, and must only queue work: to load a kernel or to take memory, CUDA may wait until the device is
        idle. No other thread of this process may do these things meanwhile."""
        live = self.versions[self.number(policy)]
        if not (is_busy and self._stops):
            started = time.perf_counter()
            verify_s = load()()
            live.fill_(version)
            return Swapped(time.perf_counter() - started, verify_s)
        self._number += 1
        try:
            self._stop()
            with torch.cuda.stream(self._side):
                verify = load()
        finally:
            self._open(live, version)
        verify_s = verify()
        self._until(RESUMED, self._side)
        return Swapped(float(self._answers[WAITED_NS]) / 1e9, verify_s)

    def _stop(self) -> None:
        """Stop the device at a gate, and return when it waits there. One more gate is queued behind everything
        else, so that there is one to stop at."""
        self._asked.fill_(self._number)
        self.check()
        last: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        last.record(torch.cuda.current_stream(self._device))
        self._until(STOPPED, last)

    def _open(self, live: torch.Tensor, version: int) -> None:
        with torch.cuda.stream(self._side):
            live.fill_(version)
            self._opened.fill_(self._number)

    def _until(self, answer: int, work: Any) -> None:
        while self._answers[answer] < self._number:
            work.query()  # raises if the device has failed and will never answer
            time.sleep(LOOK_AGAIN_S)
        self.raise_if_given_up()

    def _try(self) -> None:
        """Test whether a gate in one stream can be opened from another while much is queued. It can't where
        launches block, or where all streams share one queue. This also loads the kernels, which may need an idle
        device."""
        for _ in range(2):  # the first round does not stop
            self._asked.fill_(self._number)
            self.check(TRIAL_NS)
            for _ in range(64):
                self.versions.fill_(1)
            self._open(self.versions, 0)
            torch.cuda.synchronize(self._device)
            self._number += 1
        self._stops = not self._answers[GAVE_UP]
        self._answers[GAVE_UP] = 0
        if not self._stops:
            log.info(
                "new weights wait for what is in flight: CUDA streams of this process do not run concurrently"
            )


def _host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Return numbers in host memory that kernels can read and write."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
