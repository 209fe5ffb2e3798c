"""A baseline of `penstock bench sync`: the engine is stopped, and another one starts with the new weights."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock.bench.shapes import make_shape
from penstock.bench.sync.arm_runner import Engine, serving_of
from penstock.bench.sync.update_arm import Effort, UpdateArm
from penstock.bench.sync.update_timing import against_copy

NAME = "engine restarted"


def measure_restart(arm: UpdateArm, effort: Effort) -> dict[str, Any]:
    """The trainer saves its model; a process starts, loads it and generates. `arm` says with which batch."""
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
