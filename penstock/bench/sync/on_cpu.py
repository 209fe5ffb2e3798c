"""Runs `penstock bench sync` on a CPU: figures of copies and bytes first, then the arms, then a restarted engine.

- `shm_copy_vs_memcpy`: the trainer copies into a bucket of shared memory and the engine out of it; the slower of
  both copies is compared with `memcpy` of the same bytes. Hashing comes after them, and is reported separately.
- `delta_bytes_fraction` and `adapter_bytes_fraction`: the bytes of a smaller selection, as a fraction of those of
  full weights in bfloat16. The delta is between a version and the one 20 steps of AdamW later, with indices and
  headers as they travel; the adapter is one of rank 16 on all linear layers.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch

from penstock.bench.random_adapter import random_adapter
from penstock.bench.shapes import make_shape
from penstock.bench.sync.arm_runner import Engine, measure_all, num_threads, serving_of
from penstock.bench.sync.broadcast_figure import measure_gain
from penstock.bench.sync.plain_copy import PlainCopy
from penstock.bench.sync.publication_source import Trained
from penstock.bench.sync.update_arm import Effort, UpdateArm
from penstock.bench.sync.update_timing import against_copy, update_bytes
from penstock.models.published import published_tensors
from penstock.processes.launchers.private_folder import PrivateFolder
from penstock.records import Interrupt, UpdateSelection, WeightUpdate
from penstock.records.interfaces import WeightPublisher
from penstock.sync.in_process import InProcessPublisher
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import TRANSPORTS

SHAPE, UPDATES, WARMUP = "135m", 4, 2
TINY = "tiny"
RESTARTED = "engine restarted"
NEAREST = "shared_memory"
"""The transport with which interrupts are compared."""
BESIDE = "in_process"
"""The transport of an engine in the trainer's process."""
SELECTIONS: tuple[UpdateSelection, ...] = ("full", "delta", "adapter")

Found = Iterator[tuple[str, str, dict[str, Any]]]
"""Kind (`figures` or `arms`), name and result."""


def cpu_arms() -> list[UpdateArm]:
    """List the arms. Adapters come after full weights, which would remove them. The last arms have engines of
    their own, and those of `in_process` have one in the trainer's process."""
    transports = [name for name, each in TRANSPORTS.items() if each.between_processes and name != "cuda_ipc"]
    interrupts = [each for each in get_args(Interrupt) if each != "inflight"]
    full, delta, adapter = (
        [UpdateArm(transport=transport, selection=selection) for transport in transports]
        for selection in SELECTIONS
    )
    interrupted = [UpdateArm(transport=NEAREST, interrupt=interrupt) for interrupt in interrupts]
    drained = UpdateArm(transport=NEAREST, drained=True)
    without_kv = UpdateArm(transport=NEAREST, interrupt="abort_resume", resume_kv="recompute")
    beside = [UpdateArm(transport=BESIDE, selection=selection) for selection in SELECTIONS]
    return [*full, *interrupted, drained, *delta, *adapter, without_kv, *beside]


class CpuPart:
    """Measures chosen figures and arms by name."""

    def __init__(self, shape: str | None, updates: int | None) -> None:
        self.effort = Effort(
            shape=shape or SHAPE, device="cpu", updates=updates or UPDATES, warmup=WARMUP, rate_s=1.0
        )
        self._arms = {arm.name: arm for arm in cpu_arms()}
        self._tiny = UpdateArm(transport=NEAREST, selection="adapter")
        self._figures: dict[str, Callable[[Any, dict[str, torch.Tensor]], dict[str, Any]]] = {
            "shm copy": lambda model, weights: measure_copies(weights),
            "gloo buckets": lambda model, weights: measure_gain(),
            "delta bytes": lambda model, weights: measure_delta(weights),
            "adapter bytes": lambda model, weights: measure_adapter(model, weights),
        }

    @property
    def _tiny_name(self) -> str:
        return f"{TINY}: {self._tiny.name}"

    @property
    def names(self) -> list[str]:
        return [*self._figures, *self._arms, self._tiny_name, RESTARTED]

    def measure(self, chosen: Sequence[str]) -> Found:
        torch.set_num_threads(num_threads())
        yield from self._measure_figures([name for name in self._figures if name in chosen])
        arms = [arm for name, arm in self._arms.items() if name in chosen]
        for name, found in measure_all(arms, self.effort) if arms else ():
            yield "arms", name, found
        if self._tiny_name in chosen:
            tiny = msgspec.structs.replace(self.effort, shape=TINY)
            for _, found in measure_all([self._tiny], tiny):
                yield "arms", self._tiny_name, found
        if RESTARTED in chosen:
            yield "arms", RESTARTED, measure_restart(UpdateArm(transport=NEAREST), self.effort)

    def _measure_figures(self, names: Sequence[str]) -> Found:
        if not names:
            return
        model = make_shape(self.effort.shape, "cpu", torch.bfloat16)
        weights = {name: tensor.detach() for name, tensor in published_tensors(model).items()}
        for name in names:
            yield "figures", name, self._figures[name](model, weights)

    def headline(self, report: dict[str, Any]) -> dict[str, float]:
        figures, arms = report.get("figures", {}), report.get("arms", {})
        wanted = {
            "shm_copy_vs_memcpy": (figures, "shm copy", "vs_memcpy"),
            "gloo_bucket_gain": (figures, "gloo buckets", "gain"),
            "delta_bytes_fraction": (figures, "delta bytes", "fraction"),
            "adapter_bytes_fraction": (figures, "adapter bytes", "fraction"),
            "adapter_stall_ms": (arms, self._tiny_name, "stall_ms"),
        }
        return {
            name: kind[which][key]
            for name, (kind, which, key) in wanted.items()
            if key in kind.get(which, ())
        }


COPY_WARMUP = 2
"""As many as a publisher has slots, since the first copy into each allocates its memory."""


def measure_copies(weights: Mapping[str, torch.Tensor], updates: int = 7) -> dict[str, Any]:
    """Return the GB/s of the fastest of each copy. They alternate, so that other load affects all alike."""
    live = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    num_bytes = sum(weight.nbytes for weight in weights.values())
    memcpy = PlainCopy(num_bytes, "cpu")
    times: list[tuple[float, ...]] = []
    folder = PrivateFolder()
    try:
        publisher = SharedMemoryPublisher(weights, folder=folder.path)
        receiver = SharedMemoryReceiver()
        for version in range(COPY_WARMUP + updates):
            started = time.perf_counter()
            publisher.snapshot(version, weights)
            snapshot_s = time.perf_counter() - started
            staged = receiver.stage(publisher.describe(version))
            started = time.perf_counter()
            verify = receiver.load(staged, live)
            load_s = time.perf_counter() - started
            times.append((memcpy.run(), snapshot_s, load_s, verify()))
            publisher.release(version)
        receiver.close()
        publisher.close()
    finally:
        folder.remove()
    best = [min(column) for column in zip(*times[COPY_WARMUP:], strict=True)]
    rates = dict(zip(("memcpy", "snapshot", "load", "hash"), best, strict=True))
    return {
        "bytes": num_bytes,
        "vs_memcpy": best[0] / max(best[1], best[2]),
        "hash_vs_memcpy": best[0] / best[3],
        **{f"{name}_gb_per_s": num_bytes / 1e9 / seconds for name, seconds in rates.items()},
    }


STEPS, RANK = 20, 16


def measure_delta(weights: Mapping[str, torch.Tensor], steps: int = STEPS) -> dict[str, Any]:
    """Return fractions after all steps, and for the next step alone, which is what a run sends."""
    source = Trained(weights)
    publisher = InProcessPublisher(source.tensors, source.publishing, exchange={})
    full = publish(publisher, 0, source.tensors)
    for step in range(steps):
        source.change(step)
    later = publish(publisher, 1, source.tensors)
    source.change(steps)
    next_step = publish(publisher, 2, source.tensors)
    publisher.close()
    return {
        "full_bytes": update_bytes(full),
        "bytes": update_bytes(later),
        "fraction": update_bytes(later) / update_bytes(full),
        "one_step_fraction": update_bytes(next_step) / update_bytes(full),
    }


def measure_adapter(model: Any, weights: Mapping[str, torch.Tensor], rank: int = RANK) -> dict[str, Any]:
    spec, tensors = random_adapter(model, rank)
    publishing = Publishing(selection="adapter", base=0, adapter=spec, slots=1)
    publisher = InProcessPublisher(tensors, publishing, exchange={})
    sent = update_bytes(publish(publisher, 1, tensors))
    publisher.close()
    full = sum(weight.nbytes for weight in weights.values())
    return {"full_bytes": full, "bytes": sent, "fraction": sent / full}


def publish(publisher: WeightPublisher, version: int, tensors: Mapping[str, torch.Tensor]) -> WeightUpdate:
    publisher.snapshot(version, tensors)
    update = publisher.describe(version)
    publisher.release(version)
    return update


def measure_restart(arm: UpdateArm, effort: Effort) -> dict[str, Any]:
    """Measure a restart instead of an update: the trainer saves its model, and a process starts, loads it and
    generates with the batch of `arm`."""
    model: Any = make_shape(effort.shape, effort.device, torch.bfloat16)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        begin = time.monotonic()
        model.save_pretrained(folder)
        saved = time.monotonic()
        engine = Engine(serving_of([arm], effort, folder))
        try:
            engine.begin()
            fresh = time.monotonic()
        finally:
            engine.close()
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    stall_ms = (fresh - saved) * 1e3
    result = {
        "bytes": num_bytes,
        "snapshot_ms": (saved - begin) * 1e3,
        "stall_ms": stall_ms,
        "stall_ms_max": stall_ms,
        "lost_ms": stall_ms,
        "fresh_ms": (fresh - begin) * 1e3,
        "seen_ms": (fresh - begin) * 1e3,
    }
    return result | against_copy(result, effort.device)
