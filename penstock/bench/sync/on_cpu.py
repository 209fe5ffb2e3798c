"""`penstock bench sync` on a CPU: figures of copies and bytes first, then the arms, then a restarted engine."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import msgspec
import torch

from penstock.bench.shapes import make_shape
from penstock.bench.sync import restart
from penstock.bench.sync.arm_runner import measure_all, num_threads
from penstock.bench.sync.broadcast_figure import measure_gain
from penstock.bench.sync.byte_figures import measure_adapter, measure_delta
from penstock.bench.sync.copy_figure import measure_copies
from penstock.bench.sync.update_arm import Effort, UpdateArm
from penstock.models.published import published_tensors
from penstock.sync.transports import TRANSPORTS
from penstock.types import Interrupt, UpdateSelection

SHAPE, UPDATES, WARMUP = "135m", 4, 2
TINY = "tiny"
NEAREST = "shared_memory"
"""The transport with which interrupts are compared."""
BESIDE = "in_process"
"""The transport of an engine in the trainer's process."""
SELECTIONS: tuple[UpdateSelection, ...] = ("full", "delta", "adapter")

Found = Iterator[tuple[str, str, dict[str, Any]]]
"""Kind (`figures` or `arms`), name and result."""


def cpu_arms() -> list[UpdateArm]:
    """Adapters after full weights, which would take them off. The last arms have engines of their own, those of
    `in_process` one beside the trainer."""
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
    """What there is to measure, by name."""

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
        return [*self._figures, *self._arms, self._tiny_name, restart.NAME]

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
        if restart.NAME in chosen:
            yield "arms", restart.NAME, restart.measure_restart(UpdateArm(transport=NEAREST), self.effort)

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
