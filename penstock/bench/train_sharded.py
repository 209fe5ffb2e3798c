"""`penstock bench train --sharded`: whole steps of one FSDP2 rank, against the trainer that is not sharded.

A rank of one gathers nothing and sums with nobody, so what it takes longer is what FSDP2 itself costs: its hooks,
copies into and out of its buffers, casts to the format of the forward pass. Over NCCL on a GPU, gloo on a CPU.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.bench.shapes import hardware
from penstock.bench.train import clean
from penstock.bench.train_steps import ON_CPU, ON_GPU, steps_arm
from penstock.models.load import resolve_device
from penstock.trainer.config import ParallelConfig
from penstock.trainer.parallel.process_ranks import join_ranks, leave_ranks
from penstock.trainer.parallel.rank_layout import RankLayout

UNSHARDED, SHARDED = "unsharded", "one rank of FSDP2"


class SingleShard(RankLayout):
    """A group of one, which a run would not shard."""

    @property
    def is_sharded(self) -> bool:
        return True


def run(json_path: Path | None = None, *, shape: str | None = None, steps: int = 4) -> dict[str, Any]:
    """The same steps on the same groups; compiled on a GPU."""
    device = resolve_device("auto")
    on_gpu = device != "cpu"
    shape = shape or ("1.5b" if on_gpu else "tiny")
    load = ON_GPU if on_gpu else ON_CPU
    clean(device)
    arms = {UNSHARDED: steps_arm(shape, device, compiled=on_gpu, steps=steps, load=load)}
    clean(device)
    with tempfile.TemporaryDirectory() as folder:
        ranks = join_ranks(SingleShard(parallel=ParallelConfig(), rank=0), f"file://{folder}/meet", device)
        try:
            arms[SHARDED] = steps_arm(shape, device, compiled=on_gpu, steps=steps, load=load, parallel=ranks)
        finally:
            leave_ranks()
    ratio = arms[SHARDED]["tokens_per_s"] / arms[UNSHARDED]["tokens_per_s"]
    report = {
        "headline": {"sharded_of_unsharded": ratio},
        "hardware": hardware(device),
        "setting": {"shape": shape, "steps": steps},
        "arms": arms,
    }
    Console().print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


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
