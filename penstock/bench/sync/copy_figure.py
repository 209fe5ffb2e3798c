"""`shm_copy_vs_memcpy`: the two copies of an update through shared memory, against `memcpy` of the same bytes.

The trainer copies into a bucket, and the engine out of it. The figure is that of the slower one. Hashing comes
after both, and is reported beside them.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from penstock.bench.sync.plain_copy import PlainCopy
from penstock.orchestration.launchers.private_folder import PrivateFolder
from penstock.sync.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver

WARMUP = 2
"""As many as a publisher has slots: the first copy into each takes its memory."""


def measure_copies(weights: Mapping[str, torch.Tensor], updates: int = 7) -> dict[str, Any]:
    """GB/s of the fastest of each, in turns, so that whatever else the machine does meets all alike."""
    live = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    num_bytes = sum(weight.nbytes for weight in weights.values())
    memcpy = PlainCopy(num_bytes, "cpu")
    times: list[tuple[float, ...]] = []
    folder = PrivateFolder()
    try:
        publisher = SharedMemoryPublisher(weights, folder=folder.path)
        receiver = SharedMemoryReceiver()
        for version in range(WARMUP + updates):
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
    best = [min(column) for column in zip(*times[WARMUP:], strict=True)]
    rates = dict(zip(("memcpy", "snapshot", "load", "hash"), best, strict=True))
    return {
        "bytes": num_bytes,
        "vs_memcpy": best[0] / max(best[1], best[2]),
        "hash_vs_memcpy": best[0] / best[3],
        **{f"{name}_gb_per_s": num_bytes / 1e9 / seconds for name, seconds in rates.items()},
    }
