"""Runs a GPU without waiting for it: work is launched ahead, and its results are read once they are there.

A *launch* is a pass over prompts, or a window of decode steps that are replayed without the host looking. The
next launch is queued before the last is read, so the host's scheduling is hidden behind the device. All
launches are in one stream, so when a block changes owners, the old owner writes it before the new one, never
after. Only new weights come by another stream, while the first is paused (`weight_swap.py`). A sequence that
ends within a window draws a few tokens more, which are thrown away.
"""

import inspect
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Many
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.engines.embedded.config import SPARE_SLOTS
from penstock.engines.embedded.cuda.decode_buffers import (
    MIN_P,
    POLICY,
    POSITION,
    RECORDS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DecodeBuffers,
)
from penstock.engines.embedded.cuda.decode_rows import ON_DEVICE, Rows, settings_of
from penstock.engines.embedded.cuda.device_attention import CurrentPass, DeviceAttention, attach_pools
from penstock.engines.embedded.cuda.device_routes import DeviceRoutes
from penstock.engines.embedded.cuda.device_slots import DeviceSlots
from penstock.engines.embedded.cuda.graphs import Kind, StepGraphs
from penstock.engines.embedded.cuda.kernels.attention_splits import SPLIT_COUNTS, choose_splits
from penstock.engines.embedded.cuda.kernels.sampling import Cuts, Sampled, sample
from penstock.engines.embedded.cuda.launches import Drawn, Launch
from penstock.engines.embedded.cuda.mask_arena import SEGMENTS, Recorded
from penstock.engines.embedded.cuda.prompts import lay_out_prompts
from penstock.engines.embedded.cuda.weight_swap import Gate
from penstock.engines.embedded.paged_attention import PagedAttention
from penstock.engines.embedded.scheduler import Batch
from penstock.engines.embedded.sequence import Sequence
from penstock.models import attention
from penstock.models.transfer import download, upload
from penstock.records.sampling_masks import NO_WORDS, Packed


class Device:
    """Owns the buffers, the graphs and the launches in flight."""

    def __init__(
        self,
        model: nn.Module,
        cache: PagedAttention,
        *,
        vocab: int,
        max_batch: int,
        max_context: int,
        block_size: int,
        window: int,
        versions: Mapping[str, int],
        max_adapters: int = 0,
        routes: DeviceRoutes | None = None,
    ) -> None:
        """`versions` are those of the policies that the loaded weights serve; up to `max_adapters` others, with
        adapters, may be added. `routes` is where passes record which experts they use."""
        self._model = model
        self._cache = cache
        self._vocab = vocab
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._block_size = block_size
        self.window = window
        self.join_at = max(1, max_batch // 32)
        """Free batch slots at which waiting sequences join: prompts are computed a few at a time."""
        self._device = next(model.parameters()).device
        pool = next(iter(cache.pools.values()))
        self._kv_heads = pool.shape[2]
        blocks = -(-(max_context + 2 * window) // block_size) + 1
        self._buffers = DecodeBuffers.make(max_batch, blocks, window, cache.scratch, self._device)
        self.gate = Gate(self._device, versions, spare=max_adapters)
        self.slots = DeviceSlots(
            self.gate, max_rows=max_batch, num_slots=max_adapters + SPARE_SLOTS, device=self._device
        )
        self._rows = Rows(max_batch, blocks, cache.scratch, block_size, vocab, self.gate.numbers)
        self._rows.clear()
        self._pass = CurrentPass()
        self._routes = routes
        if routes is not None:
            routes.follow(self._pass)
        self.graphs = StepGraphs(
            self._decode,
            self._buffers,
            self.gate,
            self.slots,
            self._pass,
            scratch=cache.scratch,
            vocab=vocab,
        )
        self._in_flight: deque[Launch] = deque()
        attach_pools(model, cache.pools, self._pass)
        self._attention = DeviceAttention()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_ready(self) -> bool:
        """Return whether `collect` would not have to wait."""
        return bool(self._in_flight) and self._in_flight[0].is_ready

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a batch of any kind; returns logits of the last token of every span that ends its sequence."""
        self._copy_blocks(batch.copies)
        laid = lay_out_prompts(batch.spans, self._block_size, self._heads_of_key(), self._device)
        self._pass.plan = laid.plan
        self.slots.begin_prompts([seq.policy for seq, _, _ in batch.spans], laid.owners)
        self._attach()
        keep: dict[str, Any] = {"logits_to_keep": laid.ends} if self._selects_rows else {}
        routes = self._routes
        with routes.replaying(batch.spans, laid.owners) if routes is not None else nullcontext():
            output = self._model(
                input_ids=laid.input_ids, position_ids=laid.positions, use_cache=False, **keep
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_rows else logits.index_select(0, laid.ends)

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, sequences: list[Sequence], sources: Many[int]) -> list[Drawn]:
        """Draw a token of each sequence from the row of `logits` that `sources` names, and wait for it."""
        return self._read(self._sample(logits, sequences, sources)[1])

    @torch.inference_mode()
    def launch_prompts(self, batch: Batch, sequences: list[Sequence], sources: Many[int]) -> None:
        """Compute the batch, then draw a token of each of `sequences`, as `draw` does, without waiting."""
        logits = self.forward(batch)
        if not sequences:
            self.gate.check()
            return
        result, launch = self._sample(logits, sequences, sources)
        self._rows.drop_ended()
        staying = [at for at, seq in enumerate(sequences) if seq.num_tokens + 1 < seq.limit]
        if staying:
            rows = np.array([self._rows.take(sequences[at], ON_DEVICE) for at in staying], dtype=np.int64)
            tokens = result.tokens
            if len(staying) < len(sequences):
                tokens = tokens[upload(np.array(staying, dtype=np.int64), self._device)]
            self._buffers.tokens.index_copy_(0, upload(rows, self._device), tokens)
        for seq in sequences:
            seq.num_pending += 1
        self._queue(launch)
        self.gate.check()

    @torch.inference_mode()
    def launch_window(self, sequences: list[Sequence], steps: int, copies: list[tuple[int, int]]) -> None:
        """Queue `steps` draws for each sequence, whose blocks must have room for them."""
        self._rows.place(sequences)
        bucket = self.graphs.bucket(self._rows.used)
        if self.graphs.bucket(len(sequences)) < bucket:
            bucket = self._compact()
        longest = max(seq.num_tokens + seq.num_pending for seq in sequences) + steps
        kind = Kind(
            rows=bucket,
            splits=choose_splits(bucket, self._kv_heads, longest),
            truncates=any(_truncates(seq) for seq in sequences),
        )
        self._attach()
        graph = self.graphs.get(kind)
        self._copy_blocks(copies)
        # A sequence that ends within the window keeps drawing past its blocks, into the scratch block.
        beyond = -(-self.window // self._block_size) + 1
        self._fill(bucket, max(len(seq.blocks) for seq in sequences) + beyond)
        room = self.graphs.masks if kind.truncates else None
        segment = room.next_segment() if room is not None else 0
        for _ in range(steps):
            graph.replay()
        for seq in sequences:
            seq.num_pending += steps
            seq.num_computed += steps
        self._rows.launched()
        buffers = self._buffers
        masks = None
        if room is not None:
            arena = room.arena(buffers.ints[RECORDS], buffers.step)
            masks = room.recorded(arena, bucket, steps, segment)
        self._queue(
            Launch(
                sequences=sequences,
                rows=[self._rows.of[seq] for seq in sequences],
                steps=steps,
                versions=download(buffers.output_versions[:bucket, :steps].contiguous()),
                tokens=download(buffers.output_tokens[:bucket, :steps].contiguous()),
                logprobs=download(buffers.output_logprobs[:bucket, :steps].contiguous()),
                lengths=download(buffers.lengths[:bucket]),
                masks=masks,
                event=self._event(),
            )
        )

    def _queue(self, launch: Launch) -> None:
        self._in_flight.append(launch)
        assert len(self._in_flight) < SEGMENTS, "the next launch would write over masks that nobody has read"

    def collect(self) -> list[Drawn]:
        """Return what the oldest launch drew, after waiting for it."""
        launch = self._in_flight.popleft()
        for seq in launch.sequences:
            seq.num_pending -= launch.steps
        return self._read(launch)

    def reset(self) -> None:
        """Take all rows back, so that every sequence starts again from what the host knows of it. Nothing may be in
        flight."""
        assert not self._in_flight
        self._rows.clear()

    def renew(self) -> None:
        """Capture graphs and compile again after the model's layers have changed. Old compiled code is dropped,
        since torch keeps only so many versions of it."""
        self.graphs.forget()
        torch._dynamo.reset()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.warm_up()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs of a full batch without truncation, for contexts of every length."""
        assert not self._in_flight
        self._attach()
        rows = len(self._buffers.tokens)
        longest = self._rows.tables.shape[1] * self._block_size
        most = choose_splits(rows, self._kv_heads, longest)
        for splits in [splits for splits in SPLIT_COUNTS if splits <= most]:
            self.graphs.get(Kind(rows=rows, splits=splits, truncates=False))

    def _sample(
        self, logits: torch.Tensor, sequences: list[Sequence], sources: Many[int]
    ) -> tuple[Sampled, Launch]:
        """Draw a token of each sequence; return the result, and a launch from which the host reads it."""
        columns = [settings_of(seq, self._vocab, self.gate.numbers) for seq in sequences]
        ints = upload(np.array([ints for ints, _ in columns], dtype=np.int64).T, self._device)
        floats = upload(np.array([floats for _, floats in columns], dtype=np.float32).T, self._device)
        arena, segment, cuts = None, 0, None
        if any(_truncates(seq) for seq in sequences):
            room = self.graphs.mask_room()
            segment, arena = room.next_segment(), room.arena_of_one(ints[RECORDS])
            cuts = Cuts(ints[TOP_K], floats[TOP_P], floats[MIN_P])
        result = sample(
            logits,
            floats[TEMPERATURE],
            ints[SEED],
            ints[POSITION],
            sources=upload(np.array(sources, dtype=np.int32), self._device),
            cuts=cuts,
            arena=arena,
        )
        masks = None
        if arena is not None:
            masks = self.graphs.mask_room().recorded(arena, len(sequences), 1, segment)
        return result, self._launched(sequences, result, masks, ints[POLICY])

    def _launched(
        self, sequences: list[Sequence], result: Sampled, masks: Recorded | None, policies: torch.Tensor
    ) -> Launch:
        self.gate.drew()
        return Launch(
            sequences=sequences,
            rows=list(range(len(sequences))),
            steps=1,
            versions=download(self.gate.versions[policies][:, None]),
            tokens=download(result.tokens[:, None]),
            logprobs=download(result.logprobs[:, None]),
            lengths=None,
            masks=masks,
            event=self._event(),
        )

    def _read(self, launch: Launch) -> list[Drawn]:
        if launch.event is not None:
            launch.event.synchronize()
            self.gate.raise_if_given_up()
        tokens, logprobs, versions = (
            each.tolist() for each in (launch.tokens, launch.logprobs, launch.versions)
        )
        lengths = launch.lengths.tolist() if launch.lengths is not None else None
        table = None
        if launch.masks is not None and any(seq.request.record_sampling_mask for seq in launch.sequences):
            table = self.graphs.mask_room().read(launch.masks)
        drawn = []
        for seq, row in zip(launch.sequences, launch.rows, strict=True):
            count = launch.steps if lengths is None else lengths[row]
            masks = None
            if seq.request.record_sampling_mask:
                masks = table.packed(row, count) if table is not None else Packed([0] * count, NO_WORDS)
            drawn.append(Drawn(seq, tokens[row][:count], logprobs[row][:count], versions[row][:count], masks))
        return drawn

    def _event(self) -> Any:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _fill(self, bucket: int, used: int) -> None:
        """Copy the rows' settings, block tables and new tokens to the device."""
        rows, buffers = self._rows, self._buffers
        used = min(used, rows.tables.shape[1])
        buffers.ints[:, :bucket].copy_(upload(rows.ints[:, :bucket], self._device))
        buffers.floats[:, :bucket].copy_(upload(rows.floats[:, :bucket], self._device))
        buffers.tables[:bucket, :used].copy_(upload(rows.tables[:bucket, :used], self._device))
        if rows.begins[:bucket].any():
            news = upload(np.stack([rows.tokens[:bucket], rows.begins[:bucket]]), self._device)
            tokens = buffers.tokens[:bucket]
            tokens.copy_(torch.where(news[0] >= 0, news[0], tokens))
            buffers.ended[:bucket].masked_fill_(news[1] > 0, 0)
        buffers.lengths.zero_()
        buffers.step.zero_()

    def _compact(self) -> int:
        order = upload(self._rows.compact(), self._device)
        for column in (self._buffers.tokens, self._buffers.ended):
            column[: len(order)] = column[order]
        return self.graphs.bucket(len(order))

    def _decode(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._cache.copy_blocks(copies)
        if self._routes is not None:
            self._routes.copy_blocks(copies)

    def _attach(self) -> None:
        attention.attach(self._model, self._attention)

    def _heads_of_key(self) -> int:
        config = self._model.config.get_text_config()  # type: ignore[operator, union-attr]
        return max(1, int(config.num_attention_heads) // self._kv_heads)


def _truncates(seq: Sequence) -> bool:
    return seq.request.sampling.temperature > 0 and seq.request.sampling.truncates
