"""`python -m benchmarks scale --json FILE`: what several ranks give and cost, over gloo on this machine's cores.

Tokens/s of 1, 2 and 4 ranks (FSDP2) against what the cores allow, how far their gradients are from those of one
process, what a rank holds, and an update from 2 ranks to 2 engines: own slices against a gather to one rank.
"""

import json as json_module
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.scale.scale_model import tokens_of
from penstock.bench.child import Child
from penstock.bench.saved_report import SavedReport
from penstock.bench.sync.plain_copy import plain_copy_s
from penstock.placement.shares import usable_cores
from penstock.records import WeightUpdate
from penstock.sync.joined_update import join_updates

RANKS = (1, 2, 4)


class Ranks:
    """The processes of one group."""

    def __init__(self, stack: ExitStack, size: str, count: int, folder: Path) -> None:
        meet = f"file://{folder}/meet-{size}-{count}"
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._children = [
            Child(
                f"rank {rank}",
                "benchmarks.scale.rank_process",
                [size, str(rank), str(count), meet, str(folder)],
                environ,
            )
            for rank in range(count)
        ]
        for child in self._children:
            stack.callback(child.close)

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        line = json_module.dumps(command).encode()
        for child in self._children:
            child.tell(line)
        return [child.read() for child in self._children]


def run(json: Path | None, *, size: str = "9m", sent: str = "42m", steps: int = 4, updates: int = 15) -> None:
    """`size` is the model that is trained, `sent` the one whose weights travel."""
    report = SavedReport(json)
    report.put("setting", value={"size": size, "sent": sent, "cores": usable_cores(), "backend": "gloo"})
    with tempfile.TemporaryDirectory(dir=_memory()) as name:
        _training(report, size, steps, Path(name))
        _update(report, sent, updates, Path(name))
    _show(report.data)


def _training(report: SavedReport, size: str, steps: int, folder: Path) -> None:
    alone = 0.0
    for count in RANKS:
        with ExitStack() as stack:
            ranks = Ranks(stack, size, count, folder)
            ranks.ask(do="steps", count=1)
            seconds = max(each["seconds"] for each in ranks.ask(do="steps", count=steps))
            rate = sum(tokens_of(size, number) for number in range(2, steps + 2)) / seconds
            alone = alone or rate
            allowed = min(count, usable_cores()) * alone
            report.put(
                "tokens_per_s", str(count), value={"rate": rate, "of_what_cores_allow": rate / allowed}
            )
            if count > 1:
                error = max(each["error"] for each in ranks.ask(do="error"))
                report.headline({f"rank{count}_gradient_error": error})
            held = ranks.ask(do="bytes")
            fraction = max(each["held"] for each in held) / held[0]["whole"]
            report.put("bytes_fraction", str(count), value=fraction)
            if count == 2:
                report.headline({"sharded_bytes_fraction_2": fraction})


def _update(report: SavedReport, size: str, updates: int, folder: Path) -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, size, 2, folder)
        engines = [Child(f"engine {n}", "benchmarks.scale.reading_engine", [size]) for n in range(2)]
        for engine in engines:
            stack.callback(engine.close)
            engine.read()
        took: dict[str, list[Delivery]] = {"publish": [], "gather": []}
        for version in range(1, updates + 2):
            # Whoever goes second finds warmer caches, so they take turns.
            for how in sorted(took, reverse=version % 2 == 1):
                took[how].append(_deliver(ranks, engines, how, 2 * version + (how == "gather")))
        own, gathered = (found[1:] for found in took.values())
        own_s, gathered_s = (statistics.median(each.wall_s for each in found) for found in (own, gathered))
        own_cpu_s, gathered_cpu_s = (
            statistics.median(each.cpu_s for each in found) for found in (own, gathered)
        )
        num_bytes = own[0].num_bytes
        copy_s = plain_copy_s(num_bytes, "cpu")
        report.put(
            "update",
            value={
                "own_slices_s": own_s,
                "gathered_s": gathered_s,
                "own_slices_cpu_s": own_cpu_s,
                "gathered_cpu_s": gathered_cpu_s,
                "copy_s": copy_s,
                "bytes": num_bytes,
                "updates": len(own),
            },
        )
        report.headline(
            {
                "reshard_gain": paired_gain(
                    [each.wall_s for each in own], [each.wall_s for each in gathered]
                ),
                "reshard_gain_cpu": paired_gain(
                    [each.cpu_s for each in own], [each.cpu_s for each in gathered]
                ),
                "reshard_copies": own_s / copy_s,
            }
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """One update from the trainer's weights to both engines, verified."""

    num_bytes: int
    wall_s: float
    cpu_s: float
    """Of the rank and of the engine that took most: what it would take if each had a core to itself and nothing
    waited. On cores that others use, this can be compared and time can't."""


def paired_gain(own: Sequence[float], gathered: Sequence[float]) -> float:
    """The median of how much longer each gathered update took than the one next to it: what slows both down, such
    as other work on these cores, falls out."""
    return statistics.median(slow / quick for quick, slow in zip(own, gathered, strict=True))


def _deliver(ranks: Ranks, engines: Sequence[Child], how: str, version: int) -> Delivery:
    begin = time.perf_counter()
    answers = ranks.ask(do=how, version=version)
    update = join_updates(
        [msgspec.convert(answer["update"], WeightUpdate) for answer in answers if "update" in answer]
    )
    line = msgspec.json.encode(update)
    for engine in engines:
        engine.tell(line)
    taken = [engine.read() for engine in engines]
    wall_s = time.perf_counter() - begin
    cpu_s = max(each["cpu_s"] for each in answers) + max(each["cpu_s"] for each in taken)
    return Delivery(update.num_bytes, wall_s, cpu_s)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _show(data: dict[str, Any]) -> None:
    table = Table(title="several ranks over gloo")
    for column in ("ranks", "tokens/s", "of what the cores allow", "bytes held, of one process's"):
        table.add_column(column)
    for count, rate in data["tokens_per_s"].items():
        share = data["bytes_fraction"][count]
        table.add_row(count, f"{rate['rate']:,.0f}", f"{rate['of_what_cores_allow']:.2f}", f"{share:.2f}")
    console = Console()
    console.print(table)
    for name, value in data["headline"].items():
        console.print(f"{name}: {value:.3g}")
