"""The engine's side of `penstock bench sync`: forward passes without end, and updates between two of them.

A pass is one token for each sequence of a batch, without a past; on a GPU it is one CUDA graph. So the
weights are read and used as in decoding.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from penstock.bench.shapes import make_shape
from penstock.models import attention
from penstock.models.packed import PackedAttention
from penstock.sync.cuda_ipc import CudaIpcReceiver
from penstock.sync.shared_memory import SharedMemoryReceiver
from penstock.types import WeightUpdate


def main(transport: str, shape: str, device: str, batch: str) -> None:
    """Serve until the input ends."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    attention.register()
    model: Any = make_shape(shape, device, dtype, attention.IMPLEMENTATION)
    backend = PackedAttention()
    backend.set_single()
    attention.attach(model, backend)
    run_pass = make_pass(model, device, int(batch))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    receiver = CudaIpcReceiver() if transport == "cuda_ipc" else SharedMemoryReceiver()
    updates: queue.SimpleQueue[WeightUpdate | None] = queue.SimpleQueue()
    threading.Thread(target=read, args=(updates,), daemon=True).start()
    say({"ready": True})
    while True:
        run_pass()
        try:
            update = updates.get_nowait()
        except queue.Empty:
            continue
        if update is None:
            break
        begin = time.monotonic()
        verify_s = receiver.receive(update, parameters)
        swapped = time.monotonic()
        run_pass()
        fresh_at = time.monotonic()
        say(
            {
                "stall_ms": (swapped - begin) * 1e3,
                "verify_ms": verify_s * 1e3,
                "pass_ms": (fresh_at - swapped) * 1e3,
                "fresh_at": fresh_at,
            }
        )
    receiver.close()


def make_pass(model: Any, device: str, batch: int) -> Callable[[], object]:
    """One forward pass and the sampled tokens on the host, as an engine needs them."""
    ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=device)
    positions = torch.zeros_like(ids)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        states = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 0]
        chosen: torch.Tensor = states.argmax(-1)
        return chosen

    if device == "cpu":
        return lambda: forward().tolist()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = forward()

    def replay() -> list[Any]:
        graph.replay()
        return [
            ids.data_ptr(),
            positions.data_ptr(),
            tokens.tolist(),
        ]  # the graph reads them: keep them alive

    return replay


def read(updates: "queue.SimpleQueue[WeightUpdate | None]") -> None:
    decoder = msgspec.json.Decoder(WeightUpdate)
    for line in sys.stdin.buffer:
        updates.put(decoder.decode(line))
    updates.put(None)


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5])
