"""Runs `penstock bench sync` on a GPU, in time slices and under MPS, which is how a run shares a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.bench.random_adapter import ATTENTION
from penstock.bench.sync.arm_runner import Results
from penstock.bench.sync.update_arm import Effort, UpdateArm
from penstock.processes.launchers.mps import mps

SHAPE, UPDATES, WARMUP = "1.5b", 40, 3
SLICED, MPS = "time slices", "MPS"

Found = Iterator[tuple[str, str, dict[str, Any]]]


def gpu_arms(shape: str) -> list[UpdateArm]:
    """List the arms. Those of one batch follow each other, so that one engine serves them; adapters come last."""
    if shape == "7b":
        return [
            UpdateArm(transport="cuda_ipc", batch=256, how=MPS),
            UpdateArm(
                transport="cuda_ipc", selection="adapter", rank=32, layers=ATTENTION, batch=256, how=MPS
            ),
            UpdateArm(transport="cuda_ipc", selection="adapter", rank=32, batch=256, how=MPS),
        ]
    return [
        UpdateArm(transport="shared_memory", batch=64, how=SLICED, at_most=10),
        UpdateArm(transport="cuda_ipc", batch=512, how=SLICED),
        UpdateArm(transport="cuda_ipc", batch=512, busy=True, how=SLICED),
        UpdateArm(transport="cuda_ipc", batch=64, how=MPS),
        UpdateArm(transport="cuda_ipc", selection="delta", batch=64, how=MPS, at_most=4),
        UpdateArm(transport="cuda_ipc", batch=512, how=MPS),
        UpdateArm(transport="cuda_ipc", batch=512, busy=True, how=MPS),
        UpdateArm(transport="cuda_ipc", selection="adapter", batch=512, how=MPS),
    ]


class GpuPart:
    """Measures chosen arms by name. If MPS can't be started, its arms run in time slices."""

    def __init__(self, shape: str | None, updates: int | None, log: Callable[[str], None]) -> None:
        self.effort = Effort(
            shape=shape or SHAPE, device="cuda", updates=updates or UPDATES, warmup=WARMUP, rate_s=0.5
        )
        self._arms = {arm.name: arm for arm in gpu_arms(self.effort.shape)}
        self._log = log

    @property
    def names(self) -> list[str]:
        return list(self._arms)

    def measure(self, chosen: Sequence[str]) -> Found:
        arms = [arm for name, arm in self._arms.items() if name in chosen]
        sliced, shared = ([arm for arm in arms if arm.how == how] for how in (SLICED, MPS))
        for name, found in in_child(sliced, self.effort, {}):
            yield "arms", name, found
        if not shared:
            return
        with mps(os.environ, self._log) as daemon:
            environ = {} if daemon is None else daemon.environment()
            if daemon is None:
                shared = [msgspec.structs.replace(arm, how=SLICED) for arm in shared]
            done = {arm.name for arm in sliced}
            for name, found in in_child(
                [arm for arm in shared if arm.name not in done], self.effort, environ
            ):
                yield "arms", name, found

    def headline(self, report: dict[str, Any]) -> dict[str, float]:
        """Return the figures at the largest batch with the trainer idle, under MPS or, without it, in time
        slices."""
        arms = report.get("arms", {})
        found: dict[str, float] = {}
        for arm in self._arms.values():
            if arm.how != MPS or arm.busy or arm.batch != max(each.batch for each in self._arms.values()):
                continue
            result = arms.get(arm.name) or arms.get(msgspec.structs.replace(arm, how=SLICED).name)
            if result is not None:
                kind = "ipc" if arm.selection == "full" else "adapter_attention" if arm.layers else "adapter"
                found |= {f"{kind}_stall_ms": result["stall_ms"], f"{kind}_fresh_ms": result["fresh_ms"]}
        return found


def in_child(arms: Sequence[UpdateArm], effort: Effort, environ: Mapping[str, str]) -> Results:
    """Measure in a child process, because a process can become a client of MPS only when it starts."""
    if not arms:
        return
    words = [msgspec.json.encode(each).decode() for each in (arms, effort)]
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock.bench.sync.arm_runner", *words],
        stdout=subprocess.PIPE,
        env={**os.environ, **environ},
    )
    assert child.stdout is not None
    with child:
        try:
            for line in child.stdout:
                yield msgspec.json.decode(line, type=tuple[str, dict[str, Any]])
        except BaseException:
            child.terminate()  # its engine ends with its input
            raise
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, child.args)
