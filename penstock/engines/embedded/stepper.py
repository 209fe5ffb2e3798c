"""Executes one step of an engine, from the scheduler's plan to tokens in the outbox."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.engines.embedded.adapters.row_slots import RowSlots
from penstock.engines.embedded.model_runner import ModelRunner
from penstock.engines.embedded.outbox import Outbox
from penstock.engines.embedded.sampler import draw
from penstock.engines.embedded.scheduler import Batch, Scheduler
from penstock.engines.embedded.sequence import Sequence
from penstock.records.interfaces import Verification
from penstock.records.sampling_masks import NO_WORDS, pack_token

NOTHING_DRAWN = -1
"""Stands for the version of a policy's newest tokens while it has none."""
COUNTED = ("steps", "prefill_tokens", "cached_tokens", "preemptions")


@dataclass(frozen=True, slots=True)
class Swapped:
    """Reports that new weights are loaded. `stall_s` is how long nothing was computed for them."""

    stall_s: float
    verify_s: float


class Stepper(Protocol):
    """Advances all sequences; `counters` say how much was done."""

    counters: dict[str, float]

    @property
    def slots(self) -> RowSlots:
        """Return the table that says with which adapter each policy is computed."""

    @property
    def runs_beside(self) -> bool:
        """Return whether work queued within `beside` overlaps the passes. If not, it needs a thread."""

    def beside(self, *, in_order: bool) -> AbstractContextManager[None]:
        """Let copies into tensors that no pass uses run without waiting for the queued passes. With `in_order`
        they wait, because they read what was queued with those passes."""

    @property
    def uses_graphs(self) -> bool:
        """Return whether decode steps are replayed as CUDA graphs."""

    @property
    def is_due(self) -> bool:
        """Return whether the next step would not have to wait for a device."""

    def newest_version(self, policy: str) -> int:
        """Return the version of the weights that a policy's newest tokens were drawn with."""

    def joins(self, seq: Sequence) -> None:
        """Account for a request that has arrived."""

    def leaves(self, seq: Sequence) -> None:
        """Account for a request that has gone."""

    def step(self, versions: Mapping[str, int]) -> None:
        """Run one step for the running sequences, with weights of these versions."""

    def renew(self) -> None:
        """Prepare again after layers of the model have changed. Nothing may be in flight."""

    def forget(self, policy: str) -> None:
        """Forget a policy that is not served any more. Nothing may be in flight."""

    def drain(self) -> None:
        """Finish what is in flight; afterwards the sequences have all tokens that were drawn."""

    def swap(
        self, load: Callable[[], Verification], policy: str, version: int, *, is_prepared: bool
    ) -> Swapped:
        """Load new weights of a policy, of `version`, between two passes. See `WeightReceiver.is_prepared`."""

    def warm_up(self) -> None:
        """Do in advance what the first requests would have to wait for."""


class HostStepper:
    """Runs one forward pass a step, and draws a token for every sequence whose tokens are then all computed."""

    is_due = True
    runs_beside = False
    uses_graphs = False

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, outbox: Outbox, versions: Mapping[str, int]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._outbox = outbox
        self._newest = dict(versions)
        self.counters = dict.fromkeys(COUNTED, 0.0)

    def newest_version(self, policy: str) -> int:
        return self._newest.get(policy, NOTHING_DRAWN)

    @property
    def slots(self) -> RowSlots:
        return self._runner.slots

    def beside(self, *, in_order: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def renew(self) -> None:
        pass

    def forget(self, policy: str) -> None:
        pass

    def joins(self, seq: Sequence) -> None:
        pass

    def leaves(self, seq: Sequence) -> None:
        pass

    def drain(self) -> None:
        pass

    def swap(
        self, load: Callable[[], Verification], policy: str, version: int, *, is_prepared: bool
    ) -> Swapped:
        started = time.perf_counter()
        verify_s = load()()
        return Swapped(time.perf_counter() - started, verify_s)

    def warm_up(self) -> None:
        pass

    def step(self, versions: Mapping[str, int]) -> None:
        batch = self._scheduler.schedule()
        logits = self._runner.forward(batch)
        drawn = self._scheduler.commit(batch)
        count(batch, self.counters)
        if not drawn:
            return
        sequences, rows = [seq for _, seq in drawn], logit_rows([span for span, _ in drawn])
        if len(rows) != logits.shape[0]:
            logits = logits[rows]
        draw_and_send(logits, sequences, self._outbox, versions)
        self._newest = dict(versions)


def draw_and_send(
    logits: torch.Tensor, sequences: list[Sequence], outbox: Outbox, versions: Mapping[str, int]
) -> None:
    """Draw a token of each sequence on the host, sequence i from row i of the logits, and send it."""
    result = draw(logits, sequences)
    for row, seq in enumerate(sequences):
        masks = None
        if seq.request.record_sampling_mask:
            masks = pack_token(result.kept.get(row, NO_WORDS), outbox.vocab_size)
        reason = outbox.take(seq, [result.tokens[row]], [result.logprobs[row]], [versions[seq.policy]], masks)
        outbox.send(seq, reason)


def count(batch: Batch, counters: dict[str, float]) -> None:
    counters["steps"] += 1
    counters["prefill_tokens"] += batch.num_prefill
    counters["cached_tokens"] += batch.num_cached
    counters["preemptions"] += batch.num_preempted


def logit_rows(spans: list[int]) -> list[int]:
    """Return the row of logits for each drawn token, from the number of its span: only spans that draw have a row,
    and followers share their leader's."""
    rows: list[int] = []
    for at, span in enumerate(spans):
        rows.append(0 if at == 0 else rows[-1] + (span != spans[at - 1]))
    return rows
