"""What an update of an adapter costs an engine at work: stall and time-to-fresh, between two real processes.

    python -m penstock.bench.sync_adapter 1.5b 16            all linear layers
    python -m penstock.bench.sync_adapter 7b 32 attention

The engine decodes a full batch from its base weights with a random adapter above them, and gets another adapter
with every update. The figures are those of `bench.sync`.
"""

import json
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from penstock.bench.child import Child
from penstock.bench.random_adapter import ATTENTION, random_adapter
from penstock.bench.shapes import make_shape
from penstock.bench.sync import WARMUP, measure
from penstock.models.load import resolve_device
from penstock.sync.slot_publisher import Publishing
from penstock.sync.transports import Rendezvous, make_publisher

BEFORE_FIRST_VERSION = -1
"""What the engine's process begins with."""


def measure_adapter(
    shape: str,
    device: str,
    *,
    transport: str,
    batch: int,
    rank: int,
    updates: int,
    ends: Collection[str] = (),
) -> dict[str, Any]:
    """Medians over updates, in milliseconds, and the bytes of one. `ends` are the names of the layers; empty: all
    linear ones."""
    engine = Child("engine", "penstock.bench.sync_engine", [shape, device, str(batch), str(rank)])
    try:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        spec, tensors = random_adapter(make_shape(shape, device, dtype), rank, ends=ends)
        publishing = Publishing(selection="adapter", base=BEFORE_FIRST_VERSION, adapter=spec)
        engine.read()  # it is ready
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            publisher = make_publisher(transport, tensors, publishing, Rendezvous(Path(folder)))
            engine.ask(b"go")  # decoding begins, and does not end
            try:
                arm = measure(publisher, engine, range(WARMUP + updates), tensors)
            finally:
                publisher.close()
    finally:
        engine.close()
    return {"mb": sum(tensor.nbytes for tensor in tensors.values()) / 1e6, "rank": rank} | arm


if __name__ == "__main__":
    found = resolve_device("auto")
    on_gpu = found != "cpu"
    print(
        json.dumps(
            measure_adapter(
                sys.argv[1],
                found,
                transport="cuda_ipc" if on_gpu else "shared_memory",
                batch=512 if on_gpu else 8,
                rank=int(sys.argv[2]),
                updates=40 if on_gpu else 5,
                ends=ATTENTION if sys.argv[3:] == ["attention"] else (),
            ),
            indent=2,
        )
    )
