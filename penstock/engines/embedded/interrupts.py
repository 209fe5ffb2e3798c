"""Decides what happens to sequences in flight when new weights arrive (`sync.interrupt`).

                       answers in flight                              their keys and values
    inflight           continue; queued steps may use the new weights stay
    inflight_recompute finish what is queued, then continue           are computed again
    drain              end first; new requests wait meanwhile         there are none
    abort_resume       finish what is queued, then continue           stay, or are computed again (`resume_kv`)
    abort_retry        are thrown away and begin again                are computed again

Under all of them a token's version is that of the weights whose forward pass it was drawn from. Under `drain` and
`abort_retry` an answer has one version, and nothing that older weights computed is read again.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.engines.embedded.scheduler import Scheduler
from penstock.engines.embedded.stepper import Stepper
from penstock.records import Interrupt

INTERRUPTS: tuple[Interrupt, ...] = get_args(Interrupt)
ResumeKv = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Counts what an interrupt cost besides the copy of the weights."""

    recomputed_tokens: int = 0
    """Tokens whose keys and values were given up and are computed again."""
    discarded_tokens: int = 0
    """Tokens that had been drawn and were thrown away."""


class Interrupts:
    """Prepares sequences for new weights, as each update's `interrupt` says."""

    def __init__(
        self, scheduler: Scheduler, stepper: Stepper, *, resume_kv: ResumeKv, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when requests that were held may begin."""
        self._scheduler = scheduler
        self._stepper = stepper
        self._resume_kv = resume_kv
        self._wake = wake
        self.counters = {"recomputed_tokens": 0.0, "discarded_tokens": 0.0, "drain_s": 0.0}

    @contextmanager
    def holding(self, interrupt: Interrupt, policies: Collection[str]) -> Iterator["Drain"]:
        """For `drain`, hold back requests of these policies that have not begun while the block runs."""
        drain = Drain()
        if interrupt != "drain":
            drain.is_over.set()
            yield drain
            return
        self._scheduler.hold(policies, drain.is_over.set)
        try:
            yield drain
        finally:
            self._scheduler.release_held()
            self.counters["drain_s"] += drain.took_s
            self._wake()

    def new_version(self, policy: str, version: int, interrupt: Interrupt) -> Cost:
        """Prepare sequences for the weights that are loaded next, those of `version`; returns what that cost."""
        if interrupt not in ("inflight", "drain"):
            self._stepper.drain()
        discarded = self._scheduler.restart(policy) if interrupt == "abort_retry" else 0
        keeps = interrupt == "inflight" or (interrupt == "abort_resume" and self._resume_kv == "keep")
        recomputed = self._scheduler.new_version(policy, version, recompute_kv=not keeps)
        self.counters["discarded_tokens"] += discarded
        self.counters["recomputed_tokens"] += recomputed
        return Cost(recomputed_tokens=recomputed, discarded_tokens=discarded)


class Drain:
    """Waits for sequences in flight to end."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.took_s = 0.0

    async def wait(self) -> None:
        started = time.perf_counter()
        if not self.is_over.is_set():
            await self.is_over.wait()
            self.took_s = time.perf_counter() - started
