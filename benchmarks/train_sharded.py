"""`python -m benchmarks sharded`: whole steps of one FSDP2 rank, against the trainer that is not sharded.

A rank of one gathers nothing and sums with nobody, so what it takes longer is what FSDP2 itself costs: its hooks,
copies into and out of its buffers, casts to the format of the forward pass. Over NCCL on a GPU, gloo on a CPU.
"""

import copy
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.train_steps import ON_CPU, ON_GPU, SteppedTrainer
from penstock.bench.saved_report import SavedReport
from penstock.bench.shapes import hardware, make_shape
from penstock.bench.train import clean
from penstock.models.load import resolve_device
from penstock.trainer.config import Gather, ParallelConfig
from penstock.trainer.parallel.process_ranks import join_ranks, leave_ranks
from penstock.trainer.parallel.rank_layout import RankLayout

UNSHARDED, SHARDED = "unsharded", "one rank of FSDP2"


class SingleShard(RankLayout):
    """A group of one, which a run would not shard."""

    @property
    def is_sharded(self) -> bool:
        return True


def run(
    json_path: Path | None = None,
    *,
    shape: str | None = None,
    rounds: int = 3,
    steps: int = 2,
    gather: Gather = "step",
) -> dict[str, Any]:
    """Both trainers make the same steps on the same groups, in turns; compiled on a GPU, which holds both. Every
    round is printed and saved as it ends. `gather` is what a run chooses on GPUs with room for it."""
    device = resolve_device("auto")
    on_gpu = device != "cpu"
    shape = shape or ("1.5b" if on_gpu else "tiny")
    console, report = Console(), SavedReport(json_path)
    report.put("hardware", value=hardware(device))
    report.put("setting", value={"shape": shape, "rounds": rounds, "steps": steps, "gather": gather})
    clean(device)
    load = ON_GPU if on_gpu else ON_CPU
    model: Any = make_shape(shape, "cpu", torch.float32)
    copied = copy.deepcopy(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        # Two kinds of layers with one forward method: each needs its own compiled versions of it.
        torch._dynamo.config.patch(recompile_limit=64),
    ):
        ranks = join_ranks(SingleShard(parallel=ParallelConfig(), rank=0), f"file://{folder}/meet", device)
        try:
            trainers = {
                UNSHARDED: SteppedTrainer(model, device, compiled=on_gpu, load=load),
                SHARDED: SteppedTrainer(
                    copied, device, compiled=on_gpu, load=load, parallel=ranks, gather=gather
                ),
            }
            for name, trainer in trainers.items():
                console.print(f"{name}: compiled in {trainer.warm_up_s:.0f} s")
            _take_turns(trainers, report, console, rounds=rounds, steps=steps)
            del trainers, trainer
        finally:
            leave_ranks()
    console.print(table(report.data))
    return report.data


def _take_turns(
    trainers: Mapping[str, SteppedTrainer], report: SavedReport, console: Console, *, rounds: int, steps: int
) -> None:
    """Whoever begins a round is second in the next. The headline is the median of the rounds' ratios, so what slows
    a whole round down does not count."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for number in range(rounds):
        numbers = range(2 + number * steps, 2 + (number + 1) * steps)
        for name in sorted(trainers, reverse=number % 2 == 1):
            others = sum(trainer.held for other, trainer in trainers.items() if other != name)
            found[name].append(trainers[name].time(numbers, others=others))
        plain, sharded = (found[name][-1]["tokens_per_s"] for name in (UNSHARDED, SHARDED))
        console.print(
            f"round {number + 1}: {UNSHARDED} {plain:,.0f} tokens/s, {SHARDED} {sharded:,.0f} "
            f"({sharded / plain:.3f})"
        )
        for name, arms in found.items():
            medians = {key: statistics.median(arm[key] for arm in arms) for key in arms[0]}
            report.put("arms", name, value=medians | {"gradient_norm": arms[-1]["gradient_norm"]})
        ratios = [
            own["tokens_per_s"] / alone["tokens_per_s"]
            for own, alone in zip(found[SHARDED], found[UNSHARDED], strict=True)
        ]
        report.put("ratios", value=ratios)
        report.headline({"sharded_of_unsharded": statistics.median(ratios)})


def table(report: dict[str, Any]) -> Table:
    setting = report["setting"]
    title = f"{setting['shape']}, whole steps, {report['hardware']['device']}"
    columns = ("trainer", "ms", "tokens/s", "forward ms", "backward ms", "optimizer ms", "peak GB")
    shown = Table(*columns, title=title)
    for name, arm in report["arms"].items():
        shown.add_row(
            name,
            f"{arm['ms']:.1f}",
            f"{arm['tokens_per_s']:,.0f}",
            *(f"{arm[f'{part}_ms']:.1f}" for part in ("forward", "backward", "optimizer")),
            f"{arm['peak_gb']:.1f}",
        )
    return shown
