"""`python -m benchmarks checkpoint`: what checkpoints cost a trainer, in real steps of a shape with AdamW's states.

Steps alone, then steps before which a checkpoint is taken, then steps while it is written. The stall is what the
trainer itself reports (`checkpoint_stall_ms`): taking the checkpoint, and the next update's wait for its copies.
The first one allocates the buffers, so the headline is of the others.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.train_steps import ON_CPU, ON_GPU, make_plan
from penstock.algorithms.config import AlgorithmConfig
from penstock.bench.shapes import hardware, make_shape
from penstock.models.load import resolve_device
from penstock.trainer.checkpoint.checkpoint_writer import CheckpointRequest, CheckpointWriter
from penstock.trainer.config import TrainerConfig
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.worker.quiet import quieten

ALONE = 5
"""Steps without a checkpoint, after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one checkpoint."""

    stall_ms: float
    extra_ms: float
    """How much longer the step took before which it was taken, that included, than one alone."""
    beside_ms: float
    """A step while it was written; the first of them where it was written at once."""
    write_s: float
    gigabytes: float


class Steps:
    """A trainer that makes the same step again and again."""

    def __init__(self, shape: str, device: str, *, compiled: bool) -> None:
        load = ON_CPU if device == "cpu" else ON_GPU
        model: Any = make_shape(shape, device, torch.float32)
        config = TrainerConfig(
            dtype="float32" if device == "cpu" else "bfloat16",
            checkpointing="selective",
            compile="on" if compiled else "off",
            micro_batch_tokens=load.micro_batch_tokens,
            logprob_chunk_tokens=load.chunk_tokens,
            logprob_gap_warning=1e9,  # no engine has sampled these answers
        )
        self.trainer = PolicyTrainer(
            model,
            config=config,
            algorithm=AlgorithmConfig(),
            total_steps=1000,
            device=device,
            saved_dtype=torch.bfloat16,
        )
        self._plan = make_plan(load, model.config.vocab_size, 1)
        self._number = 0
        self.trainer.warm_up()

    def step(self) -> tuple[float, dict[str, float]]:
        """Milliseconds and metrics."""
        self._number += 1
        begin = time.perf_counter()
        result = self.trainer.step(msgspec.structs.replace(self._plan, step=self._number))
        return (time.perf_counter() - begin) * 1e3, result.values()


def run(
    json_path: Path | None = None,
    *,
    shape: str | None = None,
    checkpoints: int = 4,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Checkpoints go into a temporary folder in `folder`, one at a time."""
    quieten()
    device = resolve_device("auto")
    on_gpu = device != "cpu"
    shape = shape or ("1.5b" if on_gpu else "tiny")
    steps = Steps(shape, device, compiled=on_gpu)
    steps.step()
    alone_ms = statistics.median(steps.step()[0] for _ in range(ALONE))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        costs = list(_costs(steps, Path(name), checkpoints, alone_ms))
    later = costs[1:] or costs
    report = {
        "headline": {
            "checkpoint_stall_ms": max(cost.stall_ms for cost in later),
            "checkpoint_write_s": statistics.median(cost.write_s for cost in later),
        },
        "hardware": hardware(device),
        "setting": {"shape": shape, "checkpoints": checkpoints},
        "step_ms": alone_ms,
        "checkpoints": [asdict(cost) for cost in costs],
    }
    Console().print(_table(report, costs))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def _costs(steps: Steps, folder: Path, count: int, alone_ms: float) -> Iterator[Cost]:
    writer = CheckpointWriter(steps.trainer, lambda folder: None)
    old: tuple[str, ...] = ()
    for number in range(count):
        request = CheckpointRequest(folder=str(folder / f"step-{number}"), files={}, remove=old)
        old = (request.folder,)
        begin = time.perf_counter()
        writer.begin(request)
        begin_ms = (time.perf_counter() - begin) * 1e3
        step_ms, metrics = steps.step()
        beside = [steps.step()[0]]
        writing = writer.written()
        while not writing.done():
            beside.append(steps.step()[0])
        written = writing.result()
        yield Cost(
            stall_ms=metrics["checkpoint_stall_ms"],
            extra_ms=begin_ms + step_ms - alone_ms,
            beside_ms=statistics.median(beside),
            write_s=written.seconds,
            gigabytes=written.num_bytes / 1e9,
        )


def _table(report: dict[str, Any], costs: list[Cost]) -> Table:
    where = f"{report['setting']['shape']}, {report['hardware']['device']}"
    title = f"{where}, a step alone: {report['step_ms']:.0f} ms"
    shown = Table(
        "checkpoint", "stall ms", "extra ms", "ms a step beside it", "written in s", "GB", title=title
    )
    for number, cost in enumerate(costs, start=1):
        shown.add_row(
            str(number),
            f"{cost.stall_ms:.1f}",
            f"{cost.extra_ms:.1f}",
            f"{cost.beside_ms:.1f}",
            f"{cost.write_s:.2f}",
            f"{cost.gigabytes:.2f}",
        )
    return shown
