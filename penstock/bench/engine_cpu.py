"""Compares the embedded engine with transformers' `generate` and continuous batching (`penstock bench engine`).

There are 64 requests with 24-token prompts and log-normal answer lengths, on a tiny model and on the shape of
a 135M-parameter one. Only useful tokens count: those that a request asked for. Every number is the best of
some rounds, in which the contenders alternate; ratios compare runs of one invocation only. Also measured is
the cost of recording sampling masks (top-p 0.95 at about one nat of entropy).
"""

import copy
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.bench.engine_contenders import (
    Workload,
    make_workload,
    run_continuous,
    run_continuous_call,
    run_engine,
    run_generate,
)
from penstock.models.load import DTYPES, resolve_device
from penstock.placement.shares import usable_cores

TOP_P, ENTROPY = 0.95, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Describes a model of random weights, and how many rounds are needed to see past the noise."""

    name: str
    rounds: int
    config: dict[str, Any]


TINY = Shape(
    name="tiny",
    rounds=5,
    config={
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
)
SMALL = Shape(
    name="135m",
    rounds=1,
    config={
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
)


def run(
    json_path: Path | None = None,
    *,
    shapes: Sequence[Shape] = (TINY, SMALL),
    longest: int = 256,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run everything, print a table, write JSON. All contenders get as many `threads`; 0 takes all cores."""
    console = console or Console()
    device = resolve_device(device)
    torch.set_num_threads(threads or usable_cores())
    logging.getLogger("transformers").setLevel(logging.ERROR)
    measured = {}
    for shape in shapes:
        console.print(f"measuring {shape.name} …")
        measured[shape.name] = measure(shape, longest=longest, device=device, dtype=dtype)
    result = {
        "headline": headline(measured),
        "shapes": measured,
        "device": device,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    console.print(_table(measured))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def headline(measured: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the worst ratios of all shapes, and the tokens per second of the largest shape."""
    ratios = ("vs_generate", "vs_continuous_batching", "vs_continuous_batching_steady")
    worst = {name: min(shape[name] for shape in measured.values()) for name in ratios}
    last = list(measured.values())[-1]
    masks = max(shape["mask_cost"] for shape in measured.values())
    return {**worst, "tokens_per_s": last["tokens_per_s"], "mask_cost": masks}


def measure(shape: Shape, *, longest: int, device: str, dtype: str) -> dict[str, Any]:
    model, baseline = make_models(shape, device, dtype)
    workload = make_workload(shape.config["vocab_size"], longest=longest)
    warm = make_workload(shape.config["vocab_size"], longest=4, requests=8)
    contenders: dict[str, Callable[[Workload], float]] = {
        "penstock": lambda load: run_engine(model, load).seconds,
        "generate": lambda load: run_generate(baseline, load),
        "continuous_batching": lambda load: run_continuous_call(baseline, load),
        "continuous_batching_steady": lambda load: run_continuous(baseline, load),
    }
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for name in ("penstock", "generate"):
        contenders[name](warm)
    for number in range(shape.rounds):
        for name, contender in contenders.items():
            if name != "continuous_batching" or number == 0:  # its setup is long and hardly varies
                rounds[name].append(contender(workload))
    seconds = {name: min(times) for name, times in rounds.items()}
    rates = {name: workload.num_useful / value for name, value in seconds.items()}
    return {
        "useful_tokens": workload.num_useful,
        "seconds": rounds,
        "useful_tokens_per_s": rates,
        "tokens_per_s": rates["penstock"],
        **{
            f"vs_{name}": rates["penstock"] / rates[name]
            for name in ("generate", "continuous_batching", "continuous_batching_steady")
        },
        **measure_masks(model, workload, rounds=shape.rounds, untruncated_s=seconds["penstock"]),
    }


def make_models(shape: Shape, device: str, dtype: str) -> tuple[nn.Module, nn.Module]:
    """Make two copies of the same weights: one for our engine, one with transformers' own attention."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape.config, attn_implementation="sdpa")
    baseline: nn.Module = LlamaForCausalLM(config).to(device=device, dtype=DTYPES[dtype]).eval()
    return copy.deepcopy(baseline), baseline


def measure_masks(
    model: nn.Module, workload: Workload, *, rounds: int, untruncated_s: float
) -> dict[str, float]:
    """Measure the cost of applying top-p, and of recording which tokens it left, at about one nat of entropy."""
    options: dict[str, Any] = {"temperature": temperature_for(model, workload), "top_p": TOP_P}
    plain, recorded = [], []
    for _ in range(rounds):
        plain.append(run_engine(model, workload, **options).seconds)
        recorded.append(run_engine(model, workload, record_masks=True, **options))
    masks = recorded[0].masks
    num_bytes = sum(mask.words.nbytes + mask.counts.nbytes for mask in masks)
    kept = sum(int(mask.counts.sum()) for mask in masks)
    return {
        "mask_cost": min(each.seconds for each in recorded) / min(plain) - 1,
        "mask_bytes_per_token": num_bytes / recorded[0].num_tokens,
        "mask_ids_per_token": kept / recorded[0].num_tokens,
        "top_p_cost": min(plain) / untruncated_s - 1,
    }


@torch.inference_mode()
def temperature_for(model: nn.Module, workload: Workload) -> float:
    """Return the temperature at which next tokens have about `ENTROPY` nats: random weights have far more."""
    logits: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda _, __, output: logits.append(output.logits[0].float()))
    try:
        few = Workload(prompts=workload.prompts[:16], lengths=(8,) * 16)
        run_engine(model, few)
    finally:
        handle.remove()
    table = torch.cat(logits)
    low, high = 1e-4, 10.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        scaled = torch.log_softmax(table / middle, dim=-1)
        entropy = float(-(scaled.exp() * scaled).nansum(dim=-1).mean())
        low, high = (middle, high) if entropy < ENTROPY else (low, middle)
    return float((low * high) ** 0.5)


def _table(measured: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="useful tokens per second, and how many times penstock's")
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    for contender in ("penstock", "generate", "continuous_batching", "continuous_batching_steady"):
        cells = []
        for shape in measured.values():
            ratio = shape.get(f"vs_{contender}")
            rate = f"{shape['useful_tokens_per_s'][contender]:,.0f}"
            cells.append(rate if ratio is None else f"{rate}  ({ratio:.2f}×)")
        table.add_row(contender.replace("_", " "), *cells)
    costs = [
        f"{shape['mask_cost']:+.1%}, {shape['mask_bytes_per_token']:.0f} B" for shape in measured.values()
    ]
    table.add_row("masks: time, bytes per token", *costs)
    return table
