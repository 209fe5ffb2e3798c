"""Decoding as CUDA graphs: forward, draw, logprob and the move to the next position, all on the device.

The host fills the buffers, replays a *window* of steps without looking, and reads what they drew in one
copy. A sequence that ends within a window draws a few tokens more, which are thrown away; its blocks were
reserved for the whole window, so they harm nothing. Rows beyond the batch write into a scratch block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.engines.embedded.cuda.attention import DecodeAttention, DecodeBuffers
from penstock.engines.embedded.cuda.kernels import SPLIT_KEYS, draw
from penstock.engines.embedded.paged import PagedAttention
from penstock.engines.embedded.sequence import Sequence
from penstock.models import attention

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PROGRAMS = 264
"""Programs of the attention kernel that fill a card (two per multiprocessor of a Hopper GPU)."""


@dataclass(frozen=True, slots=True)
class Window:
    """What a window drew: (rows, steps) each."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class GraphDecoder:
    """Owns the graphs and their buffers. `prefill` is the backend to give the model back afterwards."""

    def __init__(
        self,
        model: nn.Module,
        cache: PagedAttention,
        *,
        max_batch: int,
        max_context: int,
        block_size: int,
        window: int,
        compiled: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self._backend = DecodeAttention(cache.pools)
        self._block_size = block_size
        self.window = min(window, block_size)
        self.join_at = max(1, max_batch // 32)
        """Free places at which waiting sequences join: prompts are computed a few at a time."""
        device = next(model.parameters()).device
        self._device = device
        blocks = -(-(max_context + window) // block_size) + 1
        self._buffers = DecodeBuffers.make(max_batch, blocks, window, cache.scratch, device)
        self._buckets = sorted({size for size in BUCKETS if size < max_batch} | {max_batch})
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        self._forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._logits
        if compiled:
            self._forward = torch.compile(self._logits, dynamic=True)
        self._tables = np.full((max_batch, blocks), cache.scratch, dtype=np.int32)
        self.capture_s = 0.0

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], steps: int) -> Window:
        """Draw `steps` tokens for each sequence, whose blocks must have room for them."""
        self._fill(sequences)
        longest = max(seq.num_tokens for seq in sequences) + steps
        graph = self._graph(len(sequences), longest)
        for _ in range(steps):
            graph.replay()
        rows = len(sequences)
        buffers = self._buffers
        tokens = buffers.output_tokens[:rows, :steps].to("cpu", non_blocking=True)
        logprobs = buffers.output_logprobs[:rows, :steps].to("cpu", non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return Window(tokens.tolist(), logprobs.tolist())

    def warm_up(self, max_batch: int) -> None:
        """Capture the graphs of every bucket up to a batch size, so that no request waits for one."""
        for size in self._buckets:
            if size <= max(max_batch, self._buckets[0]):
                self._graph(size, 1)

    def _fill(self, sequences: list[Sequence]) -> None:
        rows = len(sequences)
        bucket = self._bucket(rows)
        tables = self._tables
        tables[:bucket] = self._cache.scratch
        for row, seq in enumerate(sequences):
            tables[row, : len(seq.blocks)] = seq.blocks
        columns = np.zeros((3, bucket), dtype=np.int64)
        columns[0, :rows] = [seq.tokens[-1] for seq in sequences]
        columns[1, :rows] = [seq.num_tokens - 1 for seq in sequences]
        columns[2, :rows] = np.array([seq.seed for seq in sequences], dtype=np.uint64).view(np.int64)
        temperatures = np.ones(bucket, dtype=np.float32)
        temperatures[:rows] = [seq.request.sampling.temperature for seq in sequences]
        buffers = self._buffers
        used = max(len(seq.blocks) for seq in sequences) + 1
        buffers.tables[:bucket, :used].copy_(torch.from_numpy(tables[:bucket, :used]), non_blocking=True)
        moved = torch.from_numpy(columns).to(self._device, non_blocking=True)
        buffers.tokens[:bucket].copy_(moved[0])
        buffers.positions[:bucket].copy_(moved[1])
        buffers.seeds[:bucket].copy_(moved[2])
        buffers.temperatures[:bucket].copy_(torch.from_numpy(temperatures), non_blocking=True)
        buffers.step.zero_()

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def _splits(self, bucket: int, longest: int) -> int:
        """Programs per sequence: one, unless few long sequences would leave the card empty."""
        kv_heads = next(iter(self._cache.pools.values())).shape[2]
        wanted = PROGRAMS // (bucket * kv_heads)
        most = self._buffers.tables.shape[1] * self._block_size // SPLIT_KEYS
        if wanted < 2 or longest < 2 * SPLIT_KEYS:
            return 1
        return max(1, min(wanted, most, 32))

    def _graph(self, rows: int, longest: int) -> torch.cuda.CUDAGraph:
        bucket = self._bucket(rows)
        key = (bucket, self._splits(bucket, longest))
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        return self._graphs[key]

    def _capture(self, bucket: int, splits: int) -> torch.cuda.CUDAGraph:
        """Record one step at this batch size. Saved values of the buffers survive the rehearsals."""
        began = time.perf_counter()
        buffers = self._buffers
        kept = [
            buffers.tokens.clone(),
            buffers.positions.clone(),
            buffers.step.clone(),
            buffers.tables.clone(),
        ]
        buffers.tables.fill_(self._cache.scratch)
        buffers.positions.zero_()
        self._backend.splits = splits
        attention.attach(self._model, self._backend)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(3):
                buffers.step.zero_()
                buffers.positions.zero_()
                self._step(bucket)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        buffers.step.zero_()
        with torch.cuda.graph(graph, pool=self._memory):
            self._step(bucket)
        self._memory = graph.pool()
        attention.attach(self._model, self._cache)
        for target, value in zip(
            (buffers.tokens, buffers.positions, buffers.step, buffers.tables), kept, strict=True
        ):
            target.copy_(value)
        self.capture_s += time.perf_counter() - began
        return graph

    def _step(self, bucket: int) -> None:
        buffers = self._buffers
        tokens, positions = buffers.tokens[:bucket], buffers.positions[:bucket]
        self._backend.tables, self._backend.positions = buffers.tables[:bucket], positions
        logits = self._forward(tokens, positions)
        drawn, logprobs = draw(logits, buffers.seeds[:bucket], positions, buffers.temperatures[:bucket])
        buffers.output_tokens[:bucket].index_copy_(1, buffers.step, drawn[:, None])
        buffers.output_logprobs[:bucket].index_copy_(1, buffers.step, logprobs[:, None])
        tokens.copy_(drawn)
        positions.add_(1)
        buffers.step.add_(1)

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits
