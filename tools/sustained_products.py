"""Matrix products of a decode step, for seconds on end: what power allows, and which algorithm takes least of it.

    python tools/sustained_products.py --shape 7b --rows 512

First all products of a step one after another, on random data and on zeros, with the clock and the power that
`nvidia-smi` reports; then each product alone, by torch's choice and by every algorithm that cuBLASLt names. A
GPU that has just rested is faster for a moment, so rates are taken from the second half of each run.
"""

import argparse
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.bench.shapes import SHAPES

Products = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Input, weight and output of each."""
QUERY = ("clocks.sm", "power.draw.instant")


class Watch:
    """Clock and power of the GPU, ten times a second."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def since(self, start: float) -> str:
        rows = [values for at, values in self.samples if at >= start]
        if not rows:
            return "no samples"
        clock, power = (statistics.fmean(column) for column in zip(*rows, strict=True))
        return f"{clock:.0f} MHz, {power:.0f} W"

    def _follow(self) -> None:
        query = f"--query-gpu={','.join(QUERY)}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return
        for line in process.stdout or ():
            self.samples.append((time.monotonic(), [float(value) for value in line.split(",")]))


def sizes_of(shape: str) -> dict[str, tuple[int, int]]:
    """Outer and inner size of a layer's products, and of the logits."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "query, key, value": (hidden + 2 * keys, hidden),
        "output projection": (hidden, hidden),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
        "logits": (config["vocab_size"], hidden),
    }


def make(size: tuple[int, int], rows: int, count: int, device: str, scale: float) -> Products:
    """`count` products with weights of their own, so that none is found in the cache."""
    outer, inner = size
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(rows, inner, device=device, dtype=dtype) * scale
    out = torch.empty(rows, outer, device=device, dtype=dtype)
    weights = [torch.randn(outer, inner, device=device, dtype=dtype) * 0.02 * scale for _ in range(count)]
    return [(x, weight, out) for weight in weights]


def sustain(work: Callable[[], None], device: str, seconds: float) -> float:
    """Seconds of one `work` in the second half of a run."""
    replay, wait = work, _nothing
    if device != "cpu":
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay, wait = graph.replay, torch.cuda.synchronize
    start, half, times = time.monotonic(), seconds / 2, []
    while time.monotonic() - start < seconds:
        begin = time.monotonic()
        for _ in range(10):
            replay()
        wait()
        if begin - start > half:
            times.append((time.monotonic() - begin) / 10)
    return statistics.median(times or [float("nan")])


def teraflops(products: Products, seconds: float) -> float:
    return sum(2 * x.numel() * weight.shape[0] for x, weight, _ in products) / seconds / 1e12


def multiply(products: Products) -> None:
    for x, weight, out in products:
        torch.mm(x, weight.T, out=out)


def whole_step(shape: str, rows: int, device: str, seconds: float, watch: Watch) -> None:
    layers = SHAPES[shape]["num_hidden_layers"]
    for name, scale in (("random", 1.0), ("zeros", 0.0)):
        products = [
            product
            for part, size in sizes_of(shape).items()
            for product in make(size, rows, 1 if part == "logits" else layers, device, scale)
        ]
        start = time.monotonic()
        took = sustain(lambda products=products: multiply(products), device, seconds)
        rate = f"{took * 1e3:.2f} ms, {teraflops(products, took):.3g} TFLOP/s"
        print(f"a step's products, {name}: {rate}; {watch.since(start + seconds / 2)}", flush=True)


def each_product(shape: str, rows: int, device: str, seconds: float) -> None:
    for name, size in sizes_of(shape).items():
        products = make(size, rows, 2 if name == "logits" else 12, device, 1.0)
        took = sustain(lambda products=products: multiply(products), device, seconds)
        rates = [f"torch {teraflops(products, took):.3g}"]
        if device != "cpu":
            rates += by_algorithm(products, device, seconds)
        print(f"{name}: {', '.join(rates)} TFLOP/s", flush=True)


def by_algorithm(products: Products, device: str, seconds: float) -> list[str]:
    from penstock.engines.embedded.cuda.cublas import CublasError, Handle, Product, library

    x, weight, _ = products[0]
    handle = Handle(torch.device(device, torch.cuda.current_device()), library())
    product: Any = Product(handle, len(x), len(weight), x.shape[1], x.dtype, bias=False)
    rates = []
    for number, algorithm in enumerate(product.algorithms()):

        def work(algorithm: Any = algorithm) -> None:
            for x, weight, out in products:
                product.run(algorithm, x, weight, out)

        try:
            rates.append(f"{number}: {teraflops(products, sustain(work, device, seconds)):.3g}")
        except CublasError:
            continue
    return rates


def _nothing() -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole_step(asked.shape, asked.rows, device, asked.seconds, Watch())
    each_product(asked.shape, asked.rows, device, asked.seconds)


if __name__ == "__main__":
    main()
