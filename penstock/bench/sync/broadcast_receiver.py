"""Runs the receiving process of `penstock.bench.sync.broadcast_figure`. A line is an update to take in buckets;
an empty line asks for tensor after tensor."""

import json
import sys
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.records import WeightUpdate
from penstock.sync.transports import AnyReceiver


def serve(store: str, tensors: dict[str, torch.Tensor]) -> None:
    """Answer until the input ends, with the time at which the tensors had arrived."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    receiver = AnyReceiver()
    decoder = msgspec.json.Decoder(WeightUpdate)
    say({"ready": True})
    for line in sys.stdin.buffer:
        if not line.strip():
            for tensor in tensors.values():
                dist.broadcast(tensor, 0)
            say({"at": time.monotonic()})
        else:
            staged = receiver.stage(decoder.decode(line))
            verify = receiver.load(staged, tensors)
            loaded_at = time.monotonic()
            receiver.drop(staged)
            say({"at": loaded_at, "hash_s": verify()})
    receiver.close()
    dist.destroy_process_group()


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    from penstock.bench.sync.broadcast_figure import small_tensors

    torch.set_num_threads(1)
    empty = {name: torch.zeros_like(tensor) for name, tensor in small_tensors(int(sys.argv[2])).items()}
    serve(sys.argv[1], empty)
