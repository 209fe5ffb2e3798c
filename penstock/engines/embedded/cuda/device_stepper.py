"""Steps an engine on a GPU: takes what was launched two steps ago, and launches what comes next.

While a request is there that only the host can draw for (penalties, logit bias), every pass waits for the host. All
other requests are drawn by the device even then, so that a seed gives the same tokens in any batch.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from penstock.engines.embedded.adapters.row_slots import RowSlots
from penstock.engines.embedded.cuda.device import Device
from penstock.engines.embedded.outbox import Outbox
from penstock.engines.embedded.sampler import draws_on_device
from penstock.engines.embedded.scheduler import Scheduler
from penstock.engines.embedded.sequence import Sequence
from penstock.engines.embedded.stepper import COUNTED, Swapped, count, draw_and_send, logit_rows
from penstock.records.interfaces import Verification

MAX_IN_FLIGHT = 2
"""Launches in flight: one that runs, and one behind it."""
MAX_PROMPTS_IN_A_ROW = 4
"""Passes over prompts before decoding sequences get their turn."""


class DeviceStepper:
    """Keeps the device's queue filled, one launch ahead of what is read."""

    runs_beside = True

    def __init__(self, scheduler: Scheduler, device: Device, outbox: Outbox) -> None:
        self._scheduler = scheduler
        self.device = device
        self._outbox = outbox
        self._num_for_host = 0
        self._prompts_in_a_row = 0
        self._has_launched = False
        self.counters = dict.fromkeys(COUNTED, 0.0)

    @property
    def slots(self) -> RowSlots:
        return self.device.slots

    @property
    def uses_graphs(self) -> bool:
        return self.device.graphs.captures

    def beside(self, *, in_order: bool) -> AbstractContextManager[None]:
        return self.device.slots.beside(in_order=in_order)

    def renew(self) -> None:
        self.device.renew()

    def forget(self, policy: str) -> None:
        self.device.gate.forget(policy)

    @property
    def is_due(self) -> bool:
        return not self._must_take or self.device.is_ready

    def newest_version(self, policy: str) -> int:
        return self.device.gate.newest(policy)

    def joins(self, seq: Sequence) -> None:
        self._num_for_host += not draws_on_device(seq)

    def leaves(self, seq: Sequence) -> None:
        self._num_for_host -= not draws_on_device(seq)

    def step(self, versions: Mapping[str, int]) -> None:
        if self._num_for_host:
            self.drain()
            self._pass(versions)
            return
        if self._must_take:
            self._take()
        self._has_launched = self._launch()

    def drain(self) -> None:
        """Take everything in flight, so that the host knows all tokens and every row starts again from them."""
        while self.device.num_in_flight:
            self._take()
        self.device.reset()

    def swap(
        self, load: Callable[[], Verification], policy: str, version: int, *, is_prepared: bool
    ) -> Swapped:
        """Load new weights; what is in flight uses them from its next step on. Unless `is_prepared`, `load` may
        do what a busy device can't wait for, so what is in flight is finished first. No token that was drawn
        with unverified weights leaves the engine."""
        if not is_prepared:
            self.drain()
        return self.device.gate.let_in(load, policy, version, is_busy=self.device.num_in_flight > 0)

    def warm_up(self) -> None:
        self.device.warm_up()

    @property
    def _must_take(self) -> bool:
        in_flight = self.device.num_in_flight
        return in_flight >= MAX_IN_FLIGHT or (in_flight > 0 and not self._has_launched)

    def _launch(self) -> bool:
        """Queue a pass over prompts or a window of decode steps. Returns False when nothing can be queued before
        what is in flight has been taken."""
        scheduler, device = self._scheduler, self.device
        is_idle = device.num_in_flight == 0
        if self._prompts_in_a_row < MAX_PROMPTS_IN_A_ROW and scheduler.wants_prompts(join_at=device.join_at):
            batch = scheduler.schedule_prompts(may_preempt=is_idle)
            if batch is None:
                return False
            if batch.spans:
                drawn = scheduler.commit(batch)
                sources = logit_rows([span for span, _ in drawn])
                device.launch_prompts(batch, [seq for _, seq in drawn], sources)
                count(batch, self.counters)
                self._prompts_in_a_row += 1
                return True
        self._prompts_in_a_row = 0
        ready = scheduler.ready()
        if not ready:
            return False
        steps = min(device.window, max(seq.limit - seq.num_tokens - seq.num_pending for seq in ready))
        copies = scheduler.reserve(ready, steps, may_preempt=is_idle)
        ready = [seq for seq in ready if seq.is_running]
        if copies is None or not ready:
            return False
        device.launch_window(ready, steps, copies)
        self.counters["steps"] += steps
        return True

    def _take(self) -> None:
        """Read the oldest launch, and keep what each sequence drew up to where it ends."""
        for each in self.device.collect():
            if each.seq.is_running:
                reason = self._outbox.take(each.seq, each.tokens, each.logprobs, each.versions, each.masks)
                self._scheduler.taken(each.seq, has_ended=reason is not None)
                self._outbox.send(each.seq, reason)

    def _pass(self, versions: Mapping[str, int]) -> None:
        """Run one pass that the host waits for, as on a CPU."""
        batch = self._scheduler.schedule()
        logits = self.device.forward(batch)
        drawn = self._scheduler.commit(batch)
        count(batch, self.counters)
        if not drawn:
            return
        rows = logit_rows([span for span, _ in drawn])
        theirs = [(row, seq) for row, (_, seq) in zip(rows, drawn, strict=True) if draws_on_device(seq)]
        ours = [(row, seq) for row, (_, seq) in zip(rows, drawn, strict=True) if not draws_on_device(seq)]
        if theirs:
            for each in self.device.draw(logits, [seq for _, seq in theirs], [row for row, _ in theirs]):
                reason = self._outbox.take(each.seq, each.tokens, each.logprobs, each.versions, each.masks)
                self._outbox.send(each.seq, reason)
        if ours:
            draw_and_send(logits[[row for row, _ in ours]], [seq for _, seq in ours], self._outbox, versions)
            self.device.gate.drew()
