"""The engine's side of `penstock bench sync`: forward passes without end, and updates between two of them.

A pass is one token for each sequence of a batch, without a past; on a GPU it is the embedded engine's own decode
step, compiled and captured, one replay at a time. So weights are read and used as in decoding.
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
from torch import nn

from penstock.bench.shapes import make_shape
from penstock.engines.config import EngineConfig
from penstock.engines.embedded.runner import ModelRunner
from penstock.sync.cuda_ipc import CudaIpcReceiver
from penstock.sync.shared_memory import SharedMemoryReceiver
from penstock.types import WeightUpdate


def main(transport: str, shape: str, device: str, batch: str) -> None:
    """Serve until the input ends."""
    model, run_pass = make_pass(shape, device, int(batch))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    receiver = CudaIpcReceiver() if transport == "cuda_ipc" else SharedMemoryReceiver()
    say({"ready": True})
    updates = reading()
    say({"works": True})
    while True:
        run_pass()
        try:
            update = updates.get_nowait()
        except queue.Empty:
            continue
        if update is None:
            break
        begin = time.monotonic()
        verify_s = receiver.receive(update, parameters)()
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


def make_pass(shape: str, device: str, batch: int) -> tuple[nn.Module, Callable[[], object]]:
    """A model, and one forward pass of it with the sampled tokens on the host, as an engine needs them."""
    if device == "cpu":
        model: Any = make_shape(shape, device, torch.float32)
        ids = torch.arange(batch)[:, None] % model.config.vocab_size
        return model, torch.no_grad()(lambda: model(input_ids=ids).logits[:, 0].argmax(-1).tolist())
    from penstock.engines.embedded.cuda.buffers import POSITION
    from penstock.engines.embedded.cuda.graphs import Kind

    model = make_shape(shape, device, torch.bfloat16)
    config = EngineConfig(max_batch=batch, max_context=512, kv_tokens=batch * 16, compile="on", window=1)
    opened = ModelRunner(model, config).open_device(config)
    assert opened is not None
    opened.warm_up()
    graph, buffers = opened.graphs.get(Kind(rows=batch, splits=1, truncates=False)), opened.graphs.buffers

    def replay() -> list[int]:
        buffers.ints[POSITION].zero_()  # the first token of every sequence again
        buffers.step.zero_()
        graph.replay()
        drawn: list[int] = buffers.tokens.tolist()
        return drawn

    return model, torch.inference_mode()(replay)


def reading() -> "queue.SimpleQueue[WeightUpdate | None]":
    """Waits for the word to begin. Then updates as they come in, a line each; None when the input has ended."""
    updates: queue.SimpleQueue[WeightUpdate | None] = queue.SimpleQueue()
    sys.stdin.buffer.readline()

    def read() -> None:
        decoder = msgspec.json.Decoder(WeightUpdate)
        for line in sys.stdin.buffer:
            updates.put(decoder.decode(line))
        updates.put(None)

    threading.Thread(target=read, daemon=True).start()
    return updates


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5])
