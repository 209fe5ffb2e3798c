"""Measures `gloo_bucket_gain`: a broadcast of many small tensors in buckets, against one after the other.

It uses two real processes over gloo. Tensor after tensor is a loop of `torch.distributed.broadcast`. In
buckets is our collective transport: packed, sent and unpacked. The time that each side takes to hash, which a
loop does not do, is reported separately.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.bench.child import Child
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher

NUM_TENSORS, NUM_VALUES = 2000, 1024
TRANSPORT = "collective"
WARMUP = 2


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    """Make `count` tensors of 4 KB each."""
    values = torch.arange(NUM_VALUES, dtype=torch.float32)
    return {f"layers.{number}.weight": values + number for number in range(count)}


def measure_gain(count: int = NUM_TENSORS, rounds: int = 5) -> dict[str, Any]:
    """Measure the medians of both ways, which alternate."""
    tensors = small_tensors(count)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        store = str(Path(folder) / "store")
        receiver = Child("receiver", "penstock.bench.sync.broadcast_receiver", [store, str(count)])
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
        publisher = make_publisher(TRANSPORT, tensors, Publishing(), Rendezvous(folder=Path(folder)))
        try:
            receiver.read()  # the receiver is ready
            times = [
                (send_singly(receiver, tensors), *send_in_buckets(receiver, publisher, tensors, number))
                for number in range(WARMUP + rounds)
            ]
        finally:
            publisher.close()
            receiver.close()
            dist.destroy_process_group()
    singly_s, bucketed_s, describe_s, verify_s = map(statistics.median, zip(*times[WARMUP:], strict=True))
    return {
        "tensors": count,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "singly_ms": singly_s * 1e3,
        "bucketed_ms": bucketed_s * 1e3,
        "describe_ms": describe_s * 1e3,
        "verify_ms": verify_s * 1e3,
        "gain": singly_s / bucketed_s,
    }


def send_singly(receiver: Child, tensors: dict[str, torch.Tensor]) -> float:
    receiver.tell(b"")
    started = time.monotonic()
    for tensor in tensors.values():
        dist.broadcast(tensor, 0)
    return float(receiver.read()["at"]) - started


def send_in_buckets(
    receiver: Child, publisher: Any, tensors: dict[str, torch.Tensor], version: int
) -> tuple[float, float, float]:
    """Return three times in seconds: to pack, send and unpack; of the sender's hash and checksum; of the
    receiver's hash."""
    started = time.monotonic()
    publisher.snapshot(version, tensors)
    packed = time.monotonic()
    line = msgspec.json.encode(publisher.describe(version))
    described = time.monotonic()
    receiver.tell(line)
    publisher.send(version)
    answer = receiver.read()
    publisher.release(version)
    sent_s = packed - started + answer["at"] - described
    return sent_s, described - packed, answer["hash_s"]
