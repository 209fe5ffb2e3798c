"""Decode attention alone, by batch, context and heads, against the time to read its keys and values.

    python tools/decode_attention.py

Keys lie in random blocks of 16 in pools of several layers, so that no cache holds them.
Microseconds a layer, from the second half of half a second of graph replays.
"""

import time

import torch

from penstock.engines.embedded.cuda.kernels.attention_splits import choose_splits
from penstock.engines.embedded.cuda.kernels.decode_attention import attend_decode
from penstock.models.attention_options import AttentionOptions

BANDWIDTH = 4.4e12
"""Bytes a second at which an H200 reads much at once."""
LAYERS, BLOCK, DIM = 6, 16, 128
CASES = (
    (512, 325, 28, 4),
    (512, 325, 12, 2),
    (512, 2000, 28, 4),
    (256, 500, 12, 2),
    (64, 500, 12, 2),
    (64, 4096, 12, 2),
    (8, 500, 12, 2),
    (1, 4096, 12, 2),
    (512, 200, 32, 8),
    (512, 100, 16, 16),
)
"""Rows, keys of each, query heads, key heads."""


def measure(rows: int, keys: int, heads: int, kv_heads: int) -> float:
    """Seconds of one layer."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    in_table = keys // BLOCK + 1
    pools = [random(rows * in_table, BLOCK, kv_heads, 2 * DIM) for _ in range(LAYERS)]
    tables = torch.randperm(rows * in_table, device="cuda", dtype=torch.int32).view(rows, in_table)
    positions = torch.full((rows,), keys, device="cuda")
    joined = random(rows, heads + 2 * kv_heads, DIM)
    query, key, value = joined[:, :heads], joined[:, heads:-kv_heads], joined[:, -kv_heads:]
    options = AttentionOptions(scaling=DIM**-0.5)
    splits = choose_splits(rows, kv_heads, keys)

    def attend() -> None:
        for pool in pools:
            attend_decode(query, key, value, pool, tables, positions, options, splits=splits)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    halves = [replay(graph, 0.25) for _ in range(2)]
    return halves[-1] / LAYERS


def replay(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Seconds of one replay, on average over so many seconds of them."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        count += 50
    return (time.perf_counter() - began) / count


def main() -> None:
    print(f"{'rows':>6}{'keys':>6}{'heads':>8}{'µs':>9}{'floor':>8}")
    for rows, keys, heads, kv_heads in CASES:
        floor = rows * keys * kv_heads * 2 * DIM * 2 / BANDWIDTH
        took = measure(rows, keys, heads, kv_heads)
        print(f"{rows:>6}{keys:>6}{heads:>5}/{kv_heads:<2}{took * 1e6:>9.1f}{floor * 1e6:>8.1f}")


if __name__ == "__main__":
    main()
