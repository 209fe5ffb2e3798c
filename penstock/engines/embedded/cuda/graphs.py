"""Captures one decode step as a CUDA graph: forward, draw, logprob, stop tokens and the move to the next
position."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.engines.embedded.cuda.decode_buffers import (
    FIRST_STOP,
    POLICY,
    POSITION,
    RECORDS,
    SEED,
    TEMPERATURE,
    DecodeBuffers,
)
from penstock.engines.embedded.cuda.device_attention import CurrentPass, DecodePlan
from penstock.engines.embedded.cuda.device_slots import DeviceSlots
from penstock.engines.embedded.cuda.kernels.sampling import sample
from penstock.engines.embedded.cuda.kernels.step_end import advance
from penstock.engines.embedded.cuda.mask_arena import MaskRoom
from penstock.engines.embedded.cuda.weight_swap import Gate

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the tokens and positions of one row of tokens, and gives logits."""


def batch_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes that graphs are captured for."""
    return sorted({size for size in BUCKETS if size < max_batch} | {max_batch})


@dataclass(frozen=True, slots=True)
class Kind:
    """Identifies a graph: its batch size, the splits of each sequence, and whether rows are truncated."""

    rows: int
    splits: int
    truncates: bool


class Replayable(Protocol):
    def replay(self) -> None: ...


class _Call:
    """Runs the step itself, where there is no graph: on a CPU, for tests, or after a capture has failed."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def replay(self) -> None:
        self._step()


class StepGraphs:
    """Captures each kind of step when it is first needed."""

    def __init__(
        self,
        forward: Forward,
        buffers: DecodeBuffers,
        gate: Gate,
        slots: DeviceSlots,
        current: CurrentPass,
        *,
        scratch: int,
        vocab: int,
    ) -> None:
        self._forward = forward
        self.buffers = buffers
        self._gate = gate
        self._slots = slots
        self._pass = current
        self._scratch = scratch
        self._vocab = vocab
        self._device = buffers.tokens.device
        max_batch = len(buffers.tokens)
        self.buckets = batch_sizes(max_batch)
        self._known: dict[Kind, Replayable] = {}
        self._memory: Any = None
        self.captures = self._device.type == "cuda"
        """Whether steps are graphs: on a GPU, until a capture fails."""
        self.masks: MaskRoom | None = None
        self.capture_s = 0.0

    def bucket(self, rows: int) -> int:
        """Return the captured batch size that serves this many rows."""
        return next(size for size in self.buckets if size >= rows)

    def get(self, kind: Kind) -> Replayable:
        """Return the graph of this kind, or a call of the step itself where there are no graphs. A capture writes
        into the buffers, so call this before they are filled."""
        if kind not in self._known:
            if kind.truncates:
                self.mask_room()
            graph = self._capture(kind) if self.captures else None
            self._known[kind] = graph or _Call(lambda: self._step(kind))
        return self._known[kind]

    def forget(self) -> None:
        """Drop all graphs, because what they captured has changed."""
        self._known.clear()
        self._memory = None

    def mask_room(self) -> MaskRoom:
        if self.masks is None:
            rows, window = self.buffers.output_tokens.shape
            self.masks = MaskRoom(rows, window, self._vocab, self._device)
        return self.masks

    def _capture(self, kind: Kind) -> torch.cuda.CUDAGraph | None:
        """Record one step; returns None if the model does something that a graph can't hold, as some mixtures of
        experts do. Warm-up steps write into the scratch block, and the newest tokens are restored after them."""
        began = time.perf_counter()
        buffers = self.buffers
        kept = buffers.tokens.clone(), buffers.ended.clone()
        buffers.tables.fill_(self._scratch)
        buffers.ints[POSITION].zero_()
        buffers.ints[RECORDS].zero_()  # the arena has no room for warm-up steps
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                buffers.step.zero_()
                self._step(kind)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = self._record(kind)
        buffers.tokens.copy_(kept[0])
        buffers.ended.copy_(kept[1])
        self.capture_s += time.perf_counter() - began
        return graph

    def _record(self, kind: Kind) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Other threads stage updates meanwhile, and may allocate memory.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                self._step(kind)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture does not restore it
            torch.cuda.synchronize(self._device)
            log.warning("decode steps run without CUDA graphs, which is slower: %s", error)
            self.captures = False
            return None
        self._memory = graph.pool()
        return graph

    def _step(self, kind: Kind) -> None:
        buffers, rows = self.buffers, kind.rows
        tokens, positions = buffers.tokens[:rows], buffers.ints[POSITION, :rows]
        self._pass.plan = DecodePlan(buffers.tables, buffers.ints[POSITION], kind.splits)
        self._slots.begin_decode(buffers.ints[POLICY, :rows])
        logits = self._forward(tokens, positions)
        arena = None
        if kind.truncates:
            assert self.masks is not None
            arena = self.masks.arena(buffers.ints[RECORDS], buffers.step)
        drawn = sample(
            logits,
            buffers.floats[TEMPERATURE, :rows],
            buffers.ints[SEED],
            positions,
            cuts=buffers.cuts(rows) if kind.truncates else None,
            arena=arena,
        )
        gate = self._gate
        advance(
            drawn.tokens,
            drawn.logprobs,
            buffers.ints[POLICY],
            gate.versions,
            gate.device_report,
            buffers=buffers,
            first_stop=FIRST_STOP,
        )
        gate.check()
