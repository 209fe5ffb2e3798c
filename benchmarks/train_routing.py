"""`python -m benchmarks moe --only train`: what replaying recorded routes costs the trainer of a mixture.

Forward and backward of one packed row, as the live routers choose and with what they chose replayed, in turns that
begin with another arm each time.
The record is that of the model itself, so both multiply with the same experts. Its preparation, from blobs to
tensors on the device, is counted, and so is the forward pass of a few sequences by which each step sees what replay
is worth: queued behind the rows, as in a step. That one comes once a step, and here a step is one row: longer steps
pay a smaller share. The optimizer's update is not counted, so of a whole step replay is a smaller share too.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

from benchmarks.kernel_shares import profiled
from benchmarks.mixtures import count_parameters, make_mixture
from penstock.bench.shapes import hardware
from penstock.bench.train import GB, WARMUP, clean, timed
from penstock.blob_stores import MemoryBlobs
from penstock.models.load import resolve_device
from penstock.models.routing import unwatch
from penstock.records import RoutingShape, TrainSequence, sample_of_turn
from penstock.records.routing_records import id_dtype, store_routes
from penstock.trainer.forward.checkpointing import Checkpointing
from penstock.trainer.forward.dummy_batch import dummy_turn
from penstock.trainer.forward.packed_model import PackedModel
from penstock.trainer.forward.packed_row import PackedRow
from penstock.trainer.step.routing_sample import choose_sample


def run(
    json_path: Path | None = None,
    *,
    shape: str,
    tokens: int | None = None,
    length: int | None = None,
    checkpointing: Checkpointing = "selective",
    steps: int = 12,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """Both arms in turns, compiled on a GPU; a table and JSON."""
    device = resolve_device("auto")
    on_gpu = device != "cpu"
    tokens = tokens or (16384 if on_gpu else 512)
    length = length or (1024 if on_gpu else 128)
    compiled = on_gpu if compiled is None else compiled
    clean(device)
    model: Any = make_mixture(shape, device, torch.bfloat16 if on_gpu else torch.float32)
    bench = ReplayBench(
        model, tokens=tokens, length=length, checkpointing=checkpointing, compiled=compiled, device=device
    )
    measured = bench.measure(steps)
    with profiled(on_gpu) as kernels:
        bench.replayed()
        bench.forget()
    report = {
        "headline": {
            "replay_cost_fraction": (measured["step_ms"] + measured["prepare_ms"]) / measured["plain_ms"] - 1
        },
        "hardware": hardware(device),
        "setting": {
            "shape": shape,
            "tokens": tokens,
            "length": length,
            "checkpointing": checkpointing,
            "compiled": compiled,
        },
        **measured,
        "kernel_shares": kernels.shares,
        "longest_kernels": kernels.longest,
    }
    console = Console()
    console.print(table(report))
    if on_gpu:
        console.print(kernels.table("GPU time of forward and backward with replay"))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


class ReplayBench:
    """A model and one row of it, with the routes that it chooses itself and without."""

    def __init__(
        self,
        model: Any,
        *,
        tokens: int,
        length: int,
        checkpointing: Checkpointing,
        compiled: bool,
        device: str,
    ) -> None:
        self._model, self._device = model, device
        self._blobs = MemoryBlobs()
        self._policy = PackedModel(
            model, chunk_tokens=min(tokens, 4096), checkpointing=checkpointing, compiled=compiled
        )
        routers = self._policy.routers
        assert routers is not None, "the shape has experts"
        self._shape: RoutingShape = routers.shape
        self._sequences = make_sequences(model.config.vocab_size, tokens // length, length)
        self._row = self.lay_out(self._sequences, None)
        self._recorded = self._with_routes()
        self._replayed = self.lay_out(self._recorded, self._shape)
        self._sample = self.lay_out(choose_sample(self._recorded), None)
        self.num_tokens = int(self._row.input_ids.shape[1])
        self._counts: torch.Tensor | None = None

    def lay_out(self, sequences: list[TrainSequence], routing: RoutingShape | None) -> PackedRow:
        row = PackedRow.of(sequences, torch.device(self._device), blobs=self._blobs, routing=routing)
        assert row is not None  # every sequence has an answer
        return row

    def plain(self) -> None:
        """The live routers choose, in layers that know of no record."""
        unwatch(self._model)
        self._backward(self._row)

    def replayed(self) -> None:
        self._counts = self._backward(self._replayed)

    def step(self) -> None:
        """As in every step: also a few sequences with the live routers, in layers that know of records."""
        self.replayed()
        with torch.no_grad():
            self._policy.expect_routes()
            self._policy(self._sample)

    def forget(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def measure(self, steps: int) -> dict[str, float]:
        """Medians of `steps` turns."""
        for _ in range(WARMUP):
            self.plain()
            self.forget()
            self.step()
            self.forget()
        graphs = counters["stats"]["unique_graphs"]
        on_gpu = self._device != "cpu"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times: dict[str, list[float]] = {"plain": [], "replayed": [], "step": [], "prepare": []}
        arms = [("plain", self.plain), ("replayed", self.replayed), ("step", self.step)]
        for _ in range(steps):
            for name, run_arm in arms:
                times[name].append(timed(run_arm, self._device, self.forget))
            # A GPU at its power limit is faster after a rest: each arm comes first, second and last equally often.
            arms.append(arms.pop(0))
        times["prepare"] += [self._prepare_ms() for _ in range(steps)]
        self.forget()
        assert self._counts is not None
        flipped, num_choices, num_replayed = (float(count) for count in self._counts)
        median = {f"{name}_ms": statistics.median(found) for name, found in times.items()}
        flops = 6.0 * count_parameters(self._model)[1] * self.num_tokens
        return {
            **median,
            "spread_ms": max(times["plain"]) - min(times["plain"]),
            "tokens_per_s": self.num_tokens / median["replayed_ms"] * 1e3,
            "tflops": flops / median["replayed_ms"] / 1e9,
            "peak_gb": torch.cuda.max_memory_allocated() / GB if on_gpu else 0.0,
            "sample_tokens": float(self._sample.input_ids.shape[1]),
            "replayed": num_replayed / num_choices,
            "flipped": flipped / num_choices,
            "compiled_since": float(counters["stats"]["unique_graphs"] - graphs),
        }

    def _backward(self, row: PackedRow) -> torch.Tensor | None:
        outputs = self._policy(row)
        outputs.logprobs.mean().backward()  # type: ignore[no-untyped-call]
        return outputs.routing

    def _prepare_ms(self) -> float:
        """What routes add to the laying out of a row, until they are on the device."""

        def wall(make: Callable[[], PackedRow]) -> float:
            begin = time.perf_counter()
            make()
            if self._device != "cpu":
                torch.cuda.synchronize()
            return (time.perf_counter() - begin) * 1e3

        with_routes = wall(partial(self.lay_out, self._recorded, self._shape))
        return max(0.0, with_routes - wall(partial(self.lay_out, self._sequences, None)))

    def _with_routes(self) -> list[TrainSequence]:
        """The sequences with what the live routers choose for them, in the store as an engine would put it."""
        ids = self._policy.chosen(self._row).transpose(0, 1).cpu().numpy().astype(id_dtype(self._shape))
        found, start = [], 0
        for number, (sequence, size) in enumerate(zip(self._sequences, self._row.lengths, strict=True)):
            ref = store_routes(
                self._blobs, f"bench/{number}", ids[start : start + size], self._shape, start=0
            )
            sample = msgspec.structs.replace(sequence.sample, routing=(ref,))
            found.append(msgspec.structs.replace(sequence, sample=sample))
            start += size
        return found


def make_sequences(vocabulary: int, count: int, length: int) -> list[TrainSequence]:
    """Random tokens, of which the first is the prompt. Lengths are a quarter to seven quarters of `length`."""
    draw = np.random.default_rng(0)
    lengths = np.linspace(0.25, 1.75, count) * length
    turns = (
        dummy_turn(draw.integers(0, vocabulary, 1), draw.integers(0, vocabulary, size), vocabulary)
        for size in lengths.astype(int)
    )
    return [
        TrainSequence(sample=sample_of_turn(turn), group=number, episode=0)
        for number, turn in enumerate(turns)
    ]


def table(report: dict[str, Any]) -> Table:
    setting = report["setting"]
    how = "compiled" if setting["compiled"] else "not compiled"
    title = f"{setting['shape']}, {setting['tokens']} tokens, {how}, {report['hardware']['device']}"
    shown = Table("forward and backward", "ms", "", title=title)
    shown.add_row("live routers", f"{report['plain_ms']:.1f}", f"spread {report['spread_ms']:.1f} ms")
    shown.add_row(
        "routes replayed",
        f"{report['replayed_ms']:.1f}",
        f"{report['replayed']:.0%} replayed, {report['flipped']:.3%} flipped",
    )
    shown.add_row("routes laid out", f"{report['prepare_ms']:.1f}", "from blobs to the device")
    shown.add_row(
        "and the gap without",
        f"{report['step_ms']:.1f}",
        f"once a step, of {report['sample_tokens']:.0f} tokens",
    )
    shown.add_row("replay costs", f"{report['headline']['replay_cost_fraction']:+.1%}", "")
    shown.add_row(
        "with replay",
        f"{report['tokens_per_s']:,.0f} tokens/s",
        f"{report['tflops']:.4g} TFLOP/s of active weights",
    )
    shown.add_row(
        "peak",
        f"{report['peak_gb']:.1f} GB",
        f"{report['compiled_since']:.0f} graphs compiled while measured",
    )
    return shown
